"""vLLM's layers with unquantised weights, multiplying by ops.linear.

These layers are no custom ops of vLLM's, and the function they multiply by is chosen in vLLM by its own platforms. But
each asks its `quant_method` to multiply, and that of a model that was loaded can be replaced. As in vLLM's own code for
CPUs, a linear layer's weight is gone once the kernel has it in a form of its own; embeddings keep theirs to look up in.
So what reads all parameters is refused (`need_weights`), and loading them again needs `refresh`.
"""

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from vllm_opset import ops, selection
from vllm_opset.ops.contract import Problem
from vllm_opset.platform.refusals import Refusal


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
    """For one embedding. One that is only also a head, as with tied weights, is prepared when it first multiplies."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.process_weights_after_loading(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self._choice = _choice(layer.weight.data)
        self._weight = self._prepared(layer) if isinstance(layer, ParallelLMHead) else None

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._weight is None:
            self._weight = self._prepared(layer)
        return self._choice.run(x, self._weight, bias)

    def _prepared(self, layer: torch.nn.Module) -> torch.Tensor:
        return self._choice.kernel.prepared("weight", layer.weight.data)


METHODS = {UnquantizedLinearMethod: LinearMethod, UnquantizedEmbeddingMethod: EmbeddingMethod}


def bind(model: torch.nn.Module) -> None:
    """For a model that was just loaded."""
    for layer in model.modules():
        method = METHODS.get(type(getattr(layer, "quant_method", None)))
        if method is not None:
            layer.quant_method = method(layer)


def refresh(model: torch.nn.Module) -> None:
    """After weights were loaded again: vLLM tells linear layers itself, but not every embedding."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, tuple(METHODS.values())) and layer.weight.numel():
            method.process_weights_after_loading(layer)


def need_weights(model: torch.nn.Module) -> None:
    """Raises Refusal if a layer's weight is gone, for what is about to read all of them."""
    for layer in model.modules():
        if isinstance(getattr(layer, "quant_method", None), LinearMethod) and not layer.weight.numel():
            raise Refusal(
                "vllm-opset on a CPU has packed this model's weights and cannot save, hash or reset them: start the "
                """engine with --additional-config '{"opset": {"kernels": {"linear": "reference"}}}'."""
            )


def _choice(weight: torch.Tensor) -> selection.Choice:
    return selection.select(ops.linear, Problem(weight.device.type, weight.dtype))
