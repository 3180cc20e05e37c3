"""The product of one linear layer with a quantised weight, by ops.linear, and the quantisation of its activations."""

import functools
from collections.abc import Callable

import torch
from vllm.config import CompilationMode, get_current_vllm_config
from vllm.platforms import current_platform

from vllm_opset import operators, ops, selection, targets
from vllm_opset.model.packed_linear import choice, run_of
from vllm_opset.model.reloading import refilled
from vllm_opset.ops.quantisation.quantise import QuantiseProblem
from vllm_opset.ops.schemes import FP8, INT8, GroupShape, Quantised, Scheme

# The feature of targets that multiply quantised activations. Others take activations as they are, because quantising
# them would only add an error.
FEATURES = {FP8: targets.FP8, INT8: targets.INT8}
# The attribute of a tensor that the layer before has quantised; see `quantised_inputs`, which sets it.
FORM = "opset_quantised_form"


def call_of_layers() -> Callable[[selection.Choice], Callable]:
    """A function that turns a choice into what a layer calls: an operator if vLLM compiles the model that it builds."""
    compiled = get_current_vllm_config().compilation_config.mode not in (None, CompilationMode.NONE)
    return operators.of if compiled else run_of


def activation(dtype: torch.dtype, group: GroupShape) -> Quantised | None:
    """How activations are quantised to a dtype in such groups; None if the device does not multiply in the dtype."""
    can = FEATURES[dtype] in targets.of(current_platform.device_type).features
    return Quantised(dtype, group) if can else None


class ScaledLinear:
    """The product of one linear layer: called with x [..., in_features] and the bias, it gives [..., out_features].

    It quantises x first if the scheme does, unless the layer before has done so.

    weight: [out_features, in_features] with its `scale`, a matrix that was checked. dtype: of x and the result.
    x_scale: [1, 1], of activations whose scale the checkpoint gives. zero_point: of a packed weight, or None.
    call: see `call_of_layers`. before: this layer's product until its weights were loaded again, or None. Its memory
    takes the new values.
    """

    def __init__(
        self,
        call: Callable[[selection.Choice], Callable],
        weight: torch.Tensor,
        scale: torch.Tensor,
        scheme: Scheme,
        dtype: torch.dtype,
        x_scale: torch.Tensor | None = None,
        zero_point: torch.Tensor | None = None,
        before: "ScaledLinear | None" = None,
    ) -> None:
        chosen, how = choice(weight, dtype, scheme), {"weight_scale": scale}
        if zero_point is not None:
            how["weight_zero_point"] = zero_point
        prepared = chosen.kernel.prepared("weight", weight.contiguous(), **how, out_dtype=dtype)
        # Whether the weight is multiplied as it was given, so that its memory must stay.
        self.needs_given = not prepared.is_mkldnn and prepared.data_ptr() == weight.data_ptr()
        tensors, held = how | {"weight": prepared, "x_scale": x_scale}, {} if before is None else before._held
        self._held = {name: refilled(held.get(name), new) for name, new in tensors.items() if new is not None}
        self._weight, self.x_scale = self._held["weight"], self._held.get("x_scale")
        self._linear = functools.partial(call(chosen), **{name: self._held[name] for name in how}, out_dtype=dtype)
        self.activation = scheme.activation
        if scheme.activation is not None:
            self._quantise = _quantiser(call, scheme.activation, dtype, weight.shape[1], self.x_scale)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.activation is None:
            return self._linear(x, self._weight, bias)
        form = getattr(x, FORM, None)
        found = None if form is None else form.quantised_for(self)
        values, scales = self.quantise(x) if found is None else found
        out = self._linear(values, self._weight, bias, x_scale=scales)
        return out.view(*x.shape[:-1], out.shape[1])

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The values [rows, in_features] and the scales by which an input [..., in_features] is multiplied."""
        return self._quantise(x.reshape(-1, x.shape[-1]))


def _quantiser(
    call: Callable[[selection.Choice], Callable],
    stored: Quantised,
    dtype: torch.dtype,
    columns: int,
    scale: torch.Tensor | None,
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    device = current_platform.device_type
    problem = QuantiseProblem(device, dtype, stored.dtype, stored.group, scale is not None, columns)
    run = call(selection.select(ops.quantise, problem))
    return functools.partial(run, to_dtype=stored.dtype, group_shape=list(stored.group), scale=scale)
