"""vLLM's layers with unquantised weights, multiplied by ops.linear.

These layers are not custom ops in vLLM, and vLLM chooses the function that multiplies by its own platforms. But each
layer calls its `quant_method` to multiply, and that method can be replaced after a model is loaded.

This module has the code for GPUs and the code that `cpu/linear` shares with it. Weights stay in place. A layer looks
its weight up at every call, because vLLM may replace the weight. torch.compile sees an operator,
`torch.ops.vllm_opset.linear`, because a kernel decides by the number of rows. That number is known only when the
operator runs. An argument of the operator names the kernel, because the engines of a process may have chosen different
kernels. A name means the same kernel in every process that loads the compiled graph. All layers of a model have the
same name there, so that equal pieces of the graph stay equal.
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

# The kernels that engines of this process chose, by kernel name and dtype of the weight. The operator looks them up.
_compiled: dict[tuple[str, torch.dtype], Callable[..., torch.Tensor]] = {}


class LinearMethod(UnquantizedLinearMethod):
    """The method of one linear layer or LM head. The weight stays as it is."""

    def __init__(self, layer: torch.nn.Module) -> None:
        chosen = choice(layer.weight.dtype)
        if chosen.kernel.prepare:
            raise Refusal(
                f"vllm-opset on a GPU leaves weights as they are, and {chosen.kernel} of linear wants to prepare them: "
                "choose another kernel."
            )
        self._linear = chosen.run

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        # vLLM's parameters are subclasses of Tensor: PyTorch would dispatch every call through __torch_function__.
        with DisableTorchFunctionSubclass():
            return self._linear(x, layer.weight, bias)


class CompiledLinearMethod(LinearMethod):
    """The method of one linear layer in a model that torch.compile compiles."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__(layer)
        self._kernel = choice(layer.weight.dtype).name
        _compiled[self._kernel, layer.weight.dtype] = self._linear

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ops.vllm_opset.linear(x, layer.weight, bias, self._kernel)


class EmbeddingMethod(UnquantizedEmbeddingMethod):
    """The method of one embedding, which may also be the LM head, or of an LM head alone. The weight stays as it is."""

    __init__, apply = LinearMethod.__init__, LinearMethod.apply


def bind(model: torch.nn.Module, compiled: bool) -> None:
    """Replace the methods of a model that was just loaded. compiled: whether torch.compile will compile it.

    Raises Refusal for a kernel that prepares weights.
    """
    replace(model, CompiledLinearMethod if compiled else LinearMethod, EmbeddingMethod)


def multiply_one_row(model: torch.nn.Module) -> None:
    """Multiply one row by a weight of each kind, as a single request does, so that its kernels are compiled."""
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
    """Give layers with unquantised weights methods of these classes. A class is called with the layer."""
    methods = {UnquantizedLinearMethod: linear, UnquantizedEmbeddingMethod: embedding}
    for layer in model.modules():
        method = methods.get(type(getattr(layer, "quant_method", None)))
        # The weights of convolutions have more dimensions, and no layer multiplies by them.
        if method is not None and layer.weight.ndim == 2:
            layer.quant_method = method(layer)


def choice(dtype: torch.dtype) -> selection.Choice:
    """The kernel chosen for linear on this platform's device."""
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
