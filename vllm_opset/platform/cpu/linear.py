"""vLLM's layers with unquantised weights, multiplied by kernels that may store the weight in their own format.

Once the kernel has packed a linear layer's weight, the original is freed, as in vLLM's own code for a CPU. Embeddings
keep theirs, because they look rows up in it. So methods that read all parameters are refused (`need_weights`), and
loading weights again needs `refresh`.
"""

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from vllm_opset.model.linear import choice, replace
from vllm_opset.platform.refusals import Refusal


class PackedLinearMethod(UnquantizedLinearMethod):
    """The method of one linear layer, whose weight the kernel may store in its own format."""

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
    """The method of one embedding. If it is an LM head only by tied weights, its first product packs the weight."""

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
    """Replace the methods of a model that was just loaded."""
    replace(model, PackedLinearMethod, PackedEmbeddingMethod)


def refresh(model: torch.nn.Module) -> None:
    """Pack weights that were loaded again: vLLM does so for linear layers, but not for every embedding."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, PackedLinearMethod | PackedEmbeddingMethod) and layer.weight.numel():
            method.process_weights_after_loading(layer)


def need_weights(model: torch.nn.Module) -> None:
    """Raise Refusal if a layer's weight is gone, because the caller is about to read all weights."""
    for layer in model.modules():
        if isinstance(getattr(layer, "quant_method", None), PackedLinearMethod) and not layer.weight.numel():
            raise Refusal(
                "vllm-opset on a CPU has packed this model's weights and cannot save, hash or reset them: start the "
                """engine with --additional-config '{"opset": {"kernels": {"linear": "reference"}}}'."""
            )
