"""vLLM's layers with unquantised weights, multiplied by ops.linear.

These layers are not custom ops in vLLM, and vLLM chooses the function that multiplies by its own platforms. But each
layer calls its `quant_method` to multiply, and that method can be replaced after a model is loaded.

A weight stays in place unless the kernel prepares it (`packed_linear`). A layer looks its weight up at every call,
because vLLM may replace the weight. In a model that torch.compile compiles, a layer calls the op's operator.
"""

import torch
from torch._C import DisableTorchFunctionSubclass
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from vllm_opset import operators
from vllm_opset.model.packed_linear import PackedEmbeddingMethod, PackedLinearMethod, choice, replace, run_of
from vllm_opset.variants import powers_up_to


class LinearMethod(UnquantizedLinearMethod):
    """The method of one linear layer or LM head. The weight stays as it is."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._linear = choice(layer.weight).run

    def weight_of(self, layer: torch.nn.Module) -> torch.Tensor:
        return layer.weight

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        # vLLM's parameters are subclasses of Tensor: PyTorch would dispatch every call through __torch_function__.
        with DisableTorchFunctionSubclass():
            return self._linear(x, layer.weight, bias)


class CompiledLinearMethod(LinearMethod):
    """The method of one linear layer in a model that torch.compile compiles."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._linear = operators.of(choice(layer.weight))

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._linear(x, layer.weight, bias)


class EmbeddingMethod(UnquantizedEmbeddingMethod):
    """The method of one embedding, which may also be the LM head, or of an LM head alone. The weight stays as it is."""

    __init__, apply, weight_of = LinearMethod.__init__, LinearMethod.apply, LinearMethod.weight_of


def bind(model: torch.nn.Module, compiled: bool) -> None:
    """Replace the methods of a model that was just loaded. compiled: whether torch.compile will compile it."""
    in_place = CompiledLinearMethod if compiled else LinearMethod
    call = operators.of if compiled else run_of

    def linear(layer: torch.nn.Module) -> UnquantizedLinearMethod:
        return PackedLinearMethod(layer, call) if _prepares(layer) else in_place(layer)

    def embedding(layer: torch.nn.Module) -> UnquantizedEmbeddingMethod:
        return PackedEmbeddingMethod(layer) if _prepares(layer) else EmbeddingMethod(layer)

    replace(model, linear, embedding)


def _prepares(layer: torch.nn.Module) -> bool:
    """Whether the layer's kernel stores its weight in a form of its own."""
    return bool(choice(layer.weight).kernel.prepare)


def multiply(model: torch.nn.Module, most_rows: int) -> None:
    """Multiply 1, 2, 4 … and the most rows by a weight of each kind, so that the kernels of decode are compiled."""
    kinds, heads = {}, _heads(model)
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        is_head = isinstance(method, EmbeddingMethod | PackedEmbeddingMethod) and layer in heads
        if is_head or isinstance(method, LinearMethod | PackedLinearMethod):
            weight = method.weight_of(layer)
            kinds[weight.dtype, weight.shape, getattr(layer, "bias", None) is None] = layer, weight
    for layer, weight in kinds.values():
        for num_rows in powers_up_to(most_rows):
            x = torch.zeros(num_rows, weight.shape[1], dtype=layer.weight.dtype, device=weight.device)
            layer.quant_method.apply(layer, x, getattr(layer, "bias", None))


def _heads(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers by which a model multiplies to get logits. Without an LM head, as in Gemma-2, these are embeddings."""
    layers = list(model.modules())
    heads = [layer for layer in layers if isinstance(layer, ParallelLMHead)]
    if not heads and any(isinstance(layer, LogitsProcessor) for layer in layers):
        heads = [layer for layer in layers if isinstance(layer, VocabParallelEmbedding)]
    return heads
