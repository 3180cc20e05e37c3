"""Norms and activations that quantise their results for the linear layers that read them, in one launch.

A linear layer with quantised activations would otherwise quantise its input in a launch of its own. vLLM's models call
layer after layer, so a norm does not know who reads its result. A step of the model shows it, after the model was
loaded. In that step, norms and activations return random numbers in a `Traced` tensor. A linear layer that is given the
tensor says how it wants it quantised, and compares the numbers. Other functions that are given it are noted too.

From then on, results that linear layers read unchanged are returned with their quantised form as an attribute (`FORM`),
where these layers find it. All of them must agree on the form. If there are other readers, the result itself is written
as well. If there are none, the tensor is a stand-in without memory, whose values are NaN. So a reader that the step did
not show gives NaN, and not old numbers. There is no stand-in with LoRA: adapters of a request read the inputs of linear
layers, and the step has none.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.utils._pytree import tree_leaves
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_opset import ops, selection
from vllm_opset.model.fusion import runs_together
from vllm_opset.model.layers import OpsetLayer, RMSNormLayer
from vllm_opset.model.scaled_linear import FORM, ScaledLinear
from vllm_opset.ops.contract import Op
from vllm_opset.ops.quantisation._fused import why_not
from vllm_opset.ops.schemes import Quantised

# Methods that tell the layout of a tensor. All others read it, or give somebody its memory.
LAYOUT = {"size", "dim", "numel", "stride", "is_contiguous", "element_size", "__len__"}


class Wanted(NamedTuple):
    """How a linear layer stores its input. scale: the one of all its inputs, or None if each has its own."""

    stored: Quantised
    scale: torch.Tensor | None

    def agrees(self, other: "Wanted") -> bool:
        return self.stored == other.stored and self.scale is other.scale


class Form(NamedTuple):
    """The quantised form of a tensor."""

    wanted: Wanted
    values: torch.Tensor
    scales: torch.Tensor

    def quantised_for(self, linear: ScaledLinear) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Values and scales, or None if the layer wants another form."""
        return (self.values, self.scales) if self.wanted.agrees(Wanted(linear.activation, linear.x_scale)) else None


class Trace:
    """What became of one result, while readers are found out. It takes the place of a Form."""

    def __init__(self, result: torch.Tensor) -> None:
        self.result, self.expected = result, result.clone()
        self.wanted: list[Wanted] = []
        self.unchanged = True
        self.has_other_readers = False

    def quantised_for(self, linear: ScaledLinear) -> tuple[torch.Tensor, torch.Tensor]:
        self.wanted.append(Wanted(linear.activation, linear.x_scale))
        self.unchanged = self.unchanged and torch.equal(self.result, self.expected)
        return linear.quantise(self.result)


class Traced(torch.Tensor):
    """A result whose attribute FORM, a Trace, notes who reads it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        tells_layout = func.__name__ in LAYOUT or (func.__name__ == "__get__" and not isinstance(found, torch.Tensor))
        for tensor in () if tells_layout else tree_leaves((args, kwargs)):
            if isinstance(tensor, cls):
                getattr(tensor, FORM).has_other_readers = True
        return found


def bind(model: torch.nn.Module, vllm_config: VllmConfig, step: Callable[[], object]) -> None:
    """Let the layers of a model that was just loaded quantise their results where linear layers want that.

    step: runs the model once, with any number of tokens.
    """
    if vllm_config.model_config.quantization is None or not runs_together(vllm_config):
        return
    layers = [layer for layer in model.modules() if _op(layer) is not None]
    traces: dict[OpsetLayer, list[Trace]] = {layer: [] for layer in layers}
    for layer, own in traces.items():
        layer.forward = _tracing(layer, own)
    try:
        step()
    finally:
        for layer in layers:
            layer.forward = layer._forward_method
    dtype, lora = vllm_config.model_config.dtype, vllm_config.lora_config is not None
    for layer, own in traces.items():
        wanted = _agreed(own)
        if wanted is not None:
            layer.forward = QUANTISING[_op(layer)](layer, wanted, dtype, own[0].result.shape[-1], lora or _is_kept(own))


def _op(layer: torch.nn.Module) -> Op | None:
    """The op of a norm or an activation that has a form which quantises; None for other layers.

    It is None for a layer that was switched off, or whose forward was replaced.
    """
    if not isinstance(layer, OpsetLayer) or not layer.opset_kernels or layer.forward != layer._forward_method:
        return None
    op = layer.opset_kernels[0].op
    return op if op in QUANTISING else None


def _tracing(layer: OpsetLayer, traces: list[Trace]) -> Callable:
    """The layer's forward, with random numbers as its result, of which each call adds a Trace."""

    def forward(*args, **kwargs):
        found = layer._forward_method(*args, **kwargs)
        result, *others = found if isinstance(found, tuple) else (found,)
        traces.append(Trace(result.normal_()))
        traced = _marked(result.as_subclass(Traced), traces[-1])
        return (traced, *others) if others else traced

    return forward


def _agreed(traces: list[Trace]) -> Wanted | None:
    """How all linear layers that read a layer's results want them; None if there are none, or they do not agree."""
    all_wanted = [wanted for trace in traces for wanted in trace.wanted]
    if not all_wanted or not all(trace.unchanged for trace in traces):
        return None
    first, widths = all_wanted[0], {trace.result.shape[-1] for trace in traces}
    alike = all(first.agrees(wanted) for wanted in all_wanted) and len(widths) == 1
    return first if alike and why_not(first.stored.group, first.scale is not None) is None else None


def _is_kept(traces: list[Trace]) -> bool:
    """Whether results are also written as they are.

    They are with a given scale: a layer that reads them might take another one when its weights are loaded again.
    """
    return any(trace.has_other_readers or not trace.wanted or trace.wanted[0].scale is not None for trace in traces)


def _norm(layer: RMSNormLayer, wanted: Wanted, dtype: torch.dtype, columns: int, keep: bool) -> Callable:
    weight_dtype = layer._known()["weight_dtype"]
    runs = [_run(op, dtype, wanted, columns, weight_dtype) for op in (ops.rms_norm_quant, ops.fused_add_rms_norm_quant)]
    if None in runs:
        return layer._forward_method
    (norm, add_and_norm), result = runs, _result(dtype, keep)
    arguments = _arguments(wanted) | {"weight_offset": layer.weight_offset}

    def forward(x: torch.Tensor, residual: torch.Tensor | None = None):
        if x.ndim != 2 or x.dtype is not dtype:
            return layer._forward_method(x, residual)
        weight, epsilon = layer._parameters.get("weight"), layer.variance_epsilon
        if residual is None:
            y, out = result(x.shape)
            return _marked(y, Form(wanted, *norm(x, weight, epsilon, **arguments, out=out)))
        y, out = (x, x) if keep else result(x.shape)
        form = Form(wanted, *add_and_norm(x, residual, weight, epsilon, **arguments, out=out))
        return _marked(y, form), residual

    return forward


def _silu_and_mul(layer: OpsetLayer, wanted: Wanted, dtype: torch.dtype, columns: int, keep: bool) -> Callable:
    run = _run(ops.silu_and_mul_quant, dtype, wanted, columns)
    if run is None:
        return layer._forward_method
    arguments, result = _arguments(wanted), _result(dtype, keep)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.ndim != 2 or x.dtype is not dtype:
            return layer._forward_method(x)
        y, out = result((len(x), columns))
        return _marked(y, Form(wanted, *run(x, **arguments, out=out)))

    return forward


QUANTISING = {ops.rms_norm: _norm, ops.silu_and_mul: _silu_and_mul}


def _run(op: Op, dtype: torch.dtype, wanted: Wanted, columns: int, *others) -> Callable | None:
    """The chosen kernel's function; None if there is only the reference, which takes more launches than two kernels."""
    stored, static, device = wanted.stored, wanted.scale is not None, current_platform.device_type
    problem = op.problem(device, dtype, stored.dtype, stored.group, static, columns, *others)
    return None if selection.why_no_kernel(op, problem) else selection.select(op, problem).run


def _arguments(wanted: Wanted) -> dict:
    return {"to_dtype": wanted.stored.dtype, "group_shape": list(wanted.stored.group), "scale": wanted.scale}


def _result(dtype: torch.dtype, keep: bool) -> Callable[[tuple[int, ...]], tuple[torch.Tensor, torch.Tensor | None]]:
    """A function that gives the tensor to return for a shape, and the tensor to write: none, if there is a stand-in."""
    device = current_platform.device_type
    nan = torch.full((), torch.nan, dtype=dtype, device=device)

    def result(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not keep:
            return nan.expand(shape), None
        y = torch.empty(shape, dtype=dtype, device=device)
        return y, y

    return result


def _marked(result: torch.Tensor, form: Form | Trace) -> torch.Tensor:
    setattr(result, FORM, form)
    return result
