"""vLLM's layers with unquantised weights, multiplying by kernels that may have the weight in a form of their own.

As in vLLM's own code for a CPU, a linear layer's weight is gone once the kernel has it packed; embeddings keep theirs
to look up in. So what reads all parameters is refused (`need_weights`), and loading them again needs `refresh`.
"""

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from vllm_opset.model.linear import choice, replace
from vllm_opset.platform.refusals import Refusal


class PackedLinearMethod(UnquantizedLinearMethod):
    """For one linear layer, whose weight the kernel may have in a form of its own."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.process_weights_after_loading(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        weight = layer.weight.data
        chosen = choice(weight.dtype)
        self._linear, self._weight = chosen.run, chosen.kernel.prepared("weight", weight)
        if self._weight is not weight:
            layer.weight.data = weight.new_empty(0)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._linear(x, self._weight, bias)


class PackedEmbeddingMethod(UnquantizedEmbeddingMethod):
    """For one embedding. One that is only also a head, as with tied weights, is prepared when it first multiplies."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.process_weights_after_loading(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self._chosen = choice(layer.weight.dtype)
        self._weight = self._prepared(layer) if isinstance(layer, ParallelLMHead) else None

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._weight is None:
            self._weight = self._prepared(layer)
        return self._chosen.run(x, self._weight, bias)

    def _prepared(self, layer: torch.nn.Module) -> torch.Tensor:
        return self._chosen.kernel.prepared("weight", layer.weight.data)


def bind(model: torch.nn.Module) -> None:
    """For a model that was just loaded."""
    replace(model, PackedLinearMethod, PackedEmbeddingMethod)


def refresh(model: torch.nn.Module) -> None:
    """After weights were loaded again: vLLM tells linear layers itself, but not every embedding."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, PackedLinearMethod | PackedEmbeddingMethod) and layer.weight.numel():
            method.process_weights_after_loading(layer)


def need_weights(model: torch.nn.Module) -> None:
    """Raises Refusal if a layer's weight is gone, for what is about to read all of them."""
    for layer in model.modules():
        if isinstance(getattr(layer, "quant_method", None), PackedLinearMethod) and not layer.weight.numel():
            raise Refusal(
                "vllm-opset on a CPU has packed this model's weights and cannot save, hash or reset them: start the "
                """engine with --additional-config '{"opset": {"kernels": {"linear": "reference"}}}'."""
            )
