"""vLLM's layers with unquantised weights, multiplied by kernels that store the weight in their own format.

Once the kernel has packed a linear layer's weight, the original is freed, as in vLLM's own code for a CPU. Embeddings
keep theirs, because they look rows up in it. So methods that read all parameters are refused (`need_weights`), and
loading weights again needs `refresh`.
"""

import json
from collections.abc import Callable

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from vllm_opset import ops, selection
from vllm_opset.kernel import REFERENCE
from vllm_opset.model.reloading import refilled
from vllm_opset.ops.gemm.linear import LinearProblem
from vllm_opset.ops.schemes import NONE, Scheme, values_shape
from vllm_opset.unsupported import Refusal

# The weight of a layer that is gone once the kernel of this op has stored it in a form of its own.
PACKED = {"weight": "linear", "w13_weight": "fused_experts"}
# The weights of formats that are converted for every kernel.
CONVERTED = ("qweight", "weight_packed", "w13_qweight", "w13_weight_packed")


def choice(weight: torch.Tensor, dtype: torch.dtype | None = None, scheme: Scheme = NONE) -> selection.Choice:
    """The kernel chosen for linear on this platform's device. dtype: of the result; by default the weight's."""
    out_features, in_features = values_shape(weight)
    problem = LinearProblem(current_platform.device_type, dtype or weight.dtype, in_features, out_features, scheme)
    return selection.select(ops.linear, problem)


def run_of(chosen: selection.Choice) -> Callable:
    """The function that a layer calls, where no compiler needs an operator."""
    return chosen.run


class PackedLinearMethod(UnquantizedLinearMethod):
    """The method of one linear layer, whose weight the kernel may store in its own format.

    call: gives the function to call for a choice.
    """

    def __init__(self, layer: torch.nn.Module, call: Callable[[selection.Choice], Callable] = run_of) -> None:
        self._call, self._weight = call, None
        self.process_weights_after_loading(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        weight = layer.weight.data
        chosen = choice(weight)
        prepared = chosen.kernel.prepared("weight", weight)
        if prepared is not weight:
            layer.weight.data = weight.new_empty(0)
        self._linear, self._weight = self._call(chosen), refilled(self._weight, prepared)

    def weight_of(self, layer: torch.nn.Module) -> torch.Tensor:
        return self._weight

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._linear(x, self._weight, bias)


class PackedEmbeddingMethod(UnquantizedEmbeddingMethod):
    """The method of one embedding. If it is an LM head only by tied weights, its first product packs the weight."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._weight = None
        self.process_weights_after_loading(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self._chosen = choice(layer.weight)
        if self._weight is not None or isinstance(layer, ParallelLMHead):
            self._weight = refilled(self._weight, self._prepared(layer))

    def weight_of(self, layer: torch.nn.Module) -> torch.Tensor:
        return layer.weight

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._weight is None:
            self._weight = self._prepared(layer)
        return self._chosen.run(x, self._weight, bias)

    def _prepared(self, layer: torch.nn.Module) -> torch.Tensor:
        return self._chosen.kernel.prepared("weight", layer.weight.data)


def bind(model: torch.nn.Module) -> None:
    """Replace the methods of a model that was just loaded."""
    replace(model, PackedLinearMethod, PackedEmbeddingMethod)


def replace(model: torch.nn.Module, linear: Callable, embedding: Callable) -> None:
    """Give layers with unquantised weights the methods that these functions make for a layer."""
    methods = {UnquantizedLinearMethod: linear, UnquantizedEmbeddingMethod: embedding}
    for layer in model.modules():
        # In the layer's own attributes: vLLM's layers with adapters pass on those of the layer within.
        method = methods.get(type(vars(layer).get("quant_method")))
        # The weights of convolutions have more dimensions, and no layer multiplies by them.
        if method is not None and layer.weight.ndim == 2:
            layer.quant_method = method(layer)


def refresh(model: torch.nn.Module) -> None:
    """Pack weights that were loaded again: vLLM does so for linear layers, but not for every embedding."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, PackedLinearMethod | PackedEmbeddingMethod) and layer.weight.numel():
            method.process_weights_after_loading(layer)


def need_weights(model: torch.nn.Module) -> None:
    """Raise Refusal if a layer's weight is gone, because the caller is about to read all weights."""
    gone = {
        name
        for layer in model.modules()
        if hasattr(layer, "quant_method")
        for name in (*PACKED, *CONVERTED)
        if hasattr(layer, name) and not getattr(layer, name).numel()
    }
    if gone:
        kernels = {PACKED[name]: REFERENCE for name in sorted(gone - {*CONVERTED})}
        cure = f"start the engine with --additional-config '{json.dumps({'opset': {'kernels': kernels}})}'"
        raise Refusal(
            "vllm-opset has packed this model's weights and cannot save, hash or reset them: "
            f"{'choose a checkpoint without int4 weights' if gone & {*CONVERTED} else cure}."
        )
