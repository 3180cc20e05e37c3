"""vLLM's layers with unquantised weights, multiplying by ops.linear.

These layers are no custom ops of vLLM's, and the function they multiply by is chosen in vLLM by its own platforms. But
each asks its `quant_method` to multiply, and that of a model that was loaded can be replaced. torch.compile is given an
operator, `torch.ops.vllm_opset.linear`: how many rows there are, which decides how a kernel multiplies, is known only
when it runs.

As in vLLM's own code for CPUs, a linear layer's weight is gone once the kernel has it in a form of its own; embeddings
keep theirs to look up in. So what reads all parameters is refused (`need_weights`), and loading them again needs
`refresh`.
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


class CompiledLinearMethod(UnquantizedLinearMethod):
    """For one linear layer of a model that torch.compile sees through. The weight stays as it is."""

    def __init__(self, layer: torch.nn.Module) -> None:
        _choice(layer.weight.data)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ops.vllm_opset.linear(x, layer.weight, bias)


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


METHODS = (LinearMethod, CompiledLinearMethod, EmbeddingMethod)


def bind(model: torch.nn.Module, compiled: bool = False) -> None:
    """For a model that was just loaded. compiled: whether torch.compile is to see through it."""
    methods = {
        UnquantizedLinearMethod: CompiledLinearMethod if compiled else LinearMethod,
        UnquantizedEmbeddingMethod: EmbeddingMethod,
    }
    for layer in model.modules():
        method = methods.get(type(getattr(layer, "quant_method", None)))
        if method is not None:
            layer.quant_method = method(layer)


def multiply_one_row(model: torch.nn.Module) -> None:
    """With a weight of each shape, as a lone request does: kernels may be compiled for it."""
    layers = [layer for layer in model.modules() if isinstance(getattr(layer, "quant_method", None), METHODS)]
    for layer in {(layer.weight.shape, getattr(layer, "bias", None) is None): layer for layer in layers}.values():
        x = layer.weight.new_zeros(1, layer.weight.shape[1])
        layer.quant_method.apply(layer, x, getattr(layer, "bias", None))


def refresh(model: torch.nn.Module) -> None:
    """After weights were loaded again: vLLM tells linear layers itself, but not every embedding."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, LinearMethod | EmbeddingMethod) and layer.weight.numel():
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


def _operator(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _choice(weight).run(x, weight, bias)


def _result(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], len(weight)))


_library = torch.library.Library("vllm_opset", "DEF")
_library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("linear", _operator, "CompositeExplicitAutograd")
torch.library.register_fake("vllm_opset::linear", _result, lib=_library)
