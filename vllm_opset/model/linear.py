"""vLLM's layers with unquantised weights, multiplied by ops.linear.

These layers are not custom ops in vLLM, and vLLM chooses the function that multiplies by its own platforms. But each
layer calls its `quant_method` to multiply, and that method can be replaced after a model is loaded.

This module has the code for GPUs and the code that `cpu/linear` shares with it. Weights stay in place. A layer looks
its weight up at every call, because vLLM may replace the weight. In a model that torch.compile compiles, a layer calls
the op's operator.
"""

import torch
from torch._C import DisableTorchFunctionSubclass
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from vllm_opset import operators, ops, selection
from vllm_opset.ops.contract import Problem
from vllm_opset.unsupported import Refusal


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
        self._linear = operators.of(choice(layer.weight.dtype))

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._linear(x, layer.weight, bias)


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
