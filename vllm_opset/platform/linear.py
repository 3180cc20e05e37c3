"""vLLM's layers with unquantised weights, multiplying by ops.linear.

These layers are no custom ops of vLLM's, and the function they multiply by is chosen in vLLM by its own platforms. But
each asks its `quant_method` to multiply, and that of a model that was loaded can be replaced.
"""

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vllm_opset import ops, selection
from vllm_opset.ops.contract import Problem


class Multiplies:
    """Mixed in before a vLLM method, one for each layer."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.process_weights_after_loading(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        # As a plain tensor: vLLM's parameters are of classes that PyTorch asks for leave at every call.
        self._weight = layer.weight.data
        problem = Problem(self._weight.device.type, self._weight.dtype)
        self._linear = selection.select(ops.linear, problem).run

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._linear(x, self._weight, bias)


class LinearMethod(Multiplies, UnquantizedLinearMethod):
    """For linear layers."""


class EmbeddingMethod(Multiplies, UnquantizedEmbeddingMethod):
    """For embeddings, which look up with the same weight, and language model heads."""


METHODS = {UnquantizedLinearMethod: LinearMethod, UnquantizedEmbeddingMethod: EmbeddingMethod}


def bind(model: torch.nn.Module) -> None:
    """For a model that was just loaded."""
    for layer in model.modules():
        method = METHODS.get(type(getattr(layer, "quant_method", None)))
        if method is not None:
            layer.quant_method = method(layer)
