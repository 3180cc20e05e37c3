"""vLLM's layers with unquantised weights, multiplying by ops.linear.

These layers are no custom ops of vLLM's, and the function they multiply by is chosen in vLLM by its own platforms. But
each asks its `quant_method` to multiply, and that of a model that was loaded can be replaced. As in vLLM's own code for
CPUs, a linear layer's weight is gone once the kernel has it in a form of its own; embeddings keep theirs to look up in.
"""

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vllm_opset import ops, selection
from vllm_opset.ops.contract import Problem


class LinearMethod(UnquantizedLinearMethod):
    """For one linear layer."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.process_weights_after_loading(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        # As a plain tensor: vLLM's parameters are of classes that PyTorch asks for leave at every call.
        weight = layer.weight.data
        choice = _choice(weight)
        self._linear, self._weight = choice.run, choice.kernel.prepared("weight", weight)
        if self._weight is not weight:
            layer.weight.data = weight.new_empty(0)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._linear(x, self._weight, bias)


class EmbeddingMethod(UnquantizedEmbeddingMethod):
    """For one embedding, which may be a language model's head too; prepared when it is first asked to multiply."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.process_weights_after_loading(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self._linear = _choice(layer.weight.data).run
        self._weight = None

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._weight is None:
            weight = layer.weight.data
            self._weight = _choice(weight).kernel.prepared("weight", weight)
        return self._linear(x, self._weight, bias)


METHODS = {UnquantizedLinearMethod: LinearMethod, UnquantizedEmbeddingMethod: EmbeddingMethod}


def bind(model: torch.nn.Module) -> None:
    """For a model that was just loaded."""
    for layer in model.modules():
        method = METHODS.get(type(getattr(layer, "quant_method", None)))
        if method is not None:
            layer.quant_method = method(layer)


def _choice(weight: torch.Tensor) -> selection.Choice:
    return selection.select(ops.linear, Problem(weight.device.type, weight.dtype))
