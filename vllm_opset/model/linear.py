"""vLLM's layers with unquantised weights, multiplying by ops.linear.

These layers are no custom ops of vLLM's, and the function they multiply by is chosen in vLLM by its own platforms. But
each asks its `quant_method` to multiply, and that of a model that was loaded can be replaced.

Here is what GPUs have, and what `cpu/linear` shares with it. Weights stay where they are. A layer looks its weight up
at every call, since vLLM may replace it. torch.compile is given an operator, `torch.ops.vllm_opset.linear`, because a
kernel decides by the number of rows, which is known when the operator runs. An argument names the kernel, since the
engines of a process may have chosen different ones. A name means the same in every process that loads the compiled
graph. All layers of a model have the same name there, so that equal pieces of the graph stay equal.
"""

from collections.abc import Callable

import torch
from torch._C import DisableTorchFunctionSubclass
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from vllm_opset import ops, selection
from vllm_opset.ops.contract import Problem
from vllm_opset.unsupported import Refusal

# The kernels that engines of this process chose, by name and dtype of the weight. The operator looks them up.
_compiled: dict[tuple[str, torch.dtype], Callable[..., torch.Tensor]] = {}


class LinearMethod(UnquantizedLinearMethod):
    """For one linear layer, or a head. The weight stays as it is."""

    def __init__(self, layer: torch.nn.Module) -> None:
        chosen = choice(layer.weight.dtype)
        if chosen.kernel.prepare:
            raise Refusal(
                f"vllm-opset on a GPU leaves weights as they are, and {chosen.kernel} of linear wants to prepare them: "
                "choose another kernel."
            )
        self._linear = chosen.run

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        # vLLM's parameters are of classes that PyTorch would ask for leave at every call.
        with DisableTorchFunctionSubclass():
            return self._linear(x, layer.weight, bias)


class CompiledLinearMethod(LinearMethod):
    """For one linear layer of a model that torch.compile sees through."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__(layer)
        self._kernel = choice(layer.weight.dtype).name
        _compiled[self._kernel, layer.weight.dtype] = self._linear

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ops.vllm_opset.linear(x, layer.weight, bias, self._kernel)


class EmbeddingMethod(UnquantizedEmbeddingMethod):
    """For one embedding, which may be a head, also or alone. The weight stays as it is."""

    __init__, apply = LinearMethod.__init__, LinearMethod.apply


def bind(model: torch.nn.Module, compiled: bool) -> None:
    """For a model that was just loaded. compiled: whether torch.compile is to see through it.

    Raises Refusal for a kernel that prepares weights.
    """
    replace(model, CompiledLinearMethod if compiled else LinearMethod, EmbeddingMethod)


def multiply_one_row(model: torch.nn.Module) -> None:
    """With a weight of each kind, as a lone request does: kernels may be compiled for it."""
    kinds = {}
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        is_head = isinstance(method, EmbeddingMethod) and isinstance(layer, ParallelLMHead)
        if is_head or isinstance(method, LinearMethod):
            kinds[layer.weight.dtype, layer.weight.shape, getattr(layer, "bias", None) is None] = layer
    for layer in kinds.values():
        x = layer.weight.new_zeros(1, layer.weight.shape[1])
        layer.quant_method.apply(layer, x, getattr(layer, "bias", None))


def replace(model: torch.nn.Module, linear: type, embedding: type) -> None:
    """Gives layers with unquantised weights methods of these classes, which are called with the layer."""
    methods = {UnquantizedLinearMethod: linear, UnquantizedEmbeddingMethod: embedding}
    for layer in model.modules():
        method = methods.get(type(getattr(layer, "quant_method", None)))
        # The weights of convolutions have a dimension more, and nobody multiplies by them.
        if method is not None and layer.weight.ndim == 2:
            layer.quant_method = method(layer)


def choice(dtype: torch.dtype) -> selection.Choice:
    """The kernel of linear on this platform's device."""
    return selection.select(ops.linear, Problem(current_platform.device_type, dtype))


def _operator(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kernel: str) -> torch.Tensor:
    with DisableTorchFunctionSubclass():
        return _compiled[kernel, weight.dtype](x, weight, bias)


def _result(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kernel: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], len(weight)))


_library = torch.library.Library("vllm_opset", "DEF")
_library.define("linear(Tensor x, Tensor weight, Tensor? bias, str kernel) -> Tensor")
_library.impl("linear", _operator, "CompositeExplicitAutograd")
torch.library.register_fake("vllm_opset::linear", _result, lib=_library)
