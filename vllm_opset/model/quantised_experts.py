"""vLLM's experts with fp8 or int8 weights, by ops.route and ops.fused_experts.

vLLM's methods of quantisation load the weights, and ask a list of backends for a class that multiplies by them. The
class here is what `platform/quantised_layers.py` has them find. It is monolithic, as that of unquantised experts is.
Activations are quantised where the device multiplies in their dtype (`scaled_linear`).
"""

from collections.abc import Iterator

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_fp8,
    compressed_tensors_moe_w8a8_int8,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

from vllm_opset.model.experts import Experts, experts_of
from vllm_opset.model.fp8_linear import SCALES
from vllm_opset.model.mxfp4_experts import OpsetMxfp4ExpertsMethod
from vllm_opset.model.scaled_linear import activation
from vllm_opset.ops.schemes import PER_ROW, PER_TENSOR, GroupShape, Quantised, Scheme, check_scale

# vLLM's methods that load such weights.
FP8_METHODS = (Fp8MoEMethod, compressed_tensors_moe_w8a8_fp8.CompressedTensorsW8A8Fp8MoEMethod)
INT8_METHOD = compressed_tensors_moe_w8a8_int8.CompressedTensorsW8A8Int8MoEMethod
# The weights that vLLM names after the products, by its names of what they multiply.
WEIGHTS = {"a1": "w13", "a2": "w2"}


class OpsetQuantisedExperts(mk.FusedMoEExpertsMonolithic):
    """The experts of one layer. `bind` gives it the layer, once its weights are loaded."""

    expects_unquantized_inputs = True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    # Refusals come elsewhere: when the configuration is checked, or when the layer is built.

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation) -> bool:
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config) -> bool:
        return True

    @staticmethod
    def _supports_routing_method(routing_method, weight_key, activation_key) -> bool:
        return True

    @staticmethod
    def _supports_router_logits_dtype(router_logits_dtype, routing_method) -> bool:
        return True

    def bind(self, layer: torch.nn.Module) -> None:
        """Choose the layer's kernels and prepare its weights. Raises ValueError for a damaged scale, by its name."""
        config = self.quant_config
        w1_scale, w2_scale = (_scale_of(layer, name, config) for name in ("w13", "w2"))
        how = {"w1_scale": w1_scale, "w2_scale": w2_scale, "out_dtype": self.moe_config.in_dtype}
        # Checked also where activations stay as they are: a damaged checkpoint serves on no device.
        given = {} if config.a1_scale is None else {f"{name}_scale": _given(layer, name, config) for name in WEIGHTS}
        stored = _activation(layer.w13_weight.dtype, config)
        if stored is not None:
            how |= {"quant_dtype": stored.dtype, "group_shape": list(stored.group)} | given
        scheme = Scheme(Quantised(layer.w13_weight.dtype, _group(w1_scale, config)), stored)
        self.opset_experts = Experts(layer, self.moe_config, scheme, **how)
        self.opset_experts.prepare()

    def apply(self, hidden_states, w1, w2, router_logits, *args, **kwargs) -> torch.Tensor:
        """The layer's attributes say the rest, which vLLM repeats in the arguments."""
        return self.opset_experts(hidden_states, router_logits)


def bind(model: torch.nn.Module) -> None:
    """Bind the experts of a model whose weights were just loaded."""
    for layer, experts in _quantised(model):
        experts.bind(layer)


def make_room(model: torch.nn.Module) -> None:
    """Prepare a model for weights that are about to be loaded again; see `Experts.make_room`."""
    for experts in filter(None, map(experts_of, model.modules())):
        experts.make_room()


def _quantised(
    model: torch.nn.Module,
) -> Iterator[tuple[torch.nn.Module, OpsetMxfp4ExpertsMethod | OpsetQuantisedExperts]]:
    """The layers with quantised experts, and what binds them."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        experts = method if kernel is None else kernel.fused_experts
        if isinstance(experts, OpsetMxfp4ExpertsMethod | OpsetQuantisedExperts):
            yield layer, experts


def _group(scale: torch.Tensor, config: FusedMoEQuantConfig) -> GroupShape:
    """The values of one expert's weight that share a scale."""
    if config.block_shape is not None:
        return GroupShape(*config.block_shape)
    return PER_TENSOR if scale.numel() == len(scale) else PER_ROW


def _scale_of(layer: torch.nn.Module, weight: str, config: FusedMoEQuantConfig) -> torch.Tensor:
    """The scales of a weight in fp32, a matrix for each expert. Raises ValueError for damaged ones, by their name."""
    name = next(name for name in SCALES if hasattr(layer, f"{weight}_{name}"))
    scale, shape = getattr(layer, f"{weight}_{name}").data.float(), getattr(layer, f"{weight}_weight").shape
    scale = scale.view(-1, 1, 1) if scale.ndim == 1 else scale
    check_scale(f"{layer.layer_name}.{weight}_{name}", scale, shape, _group(scale, config))
    return scale.contiguous()


def _activation(dtype: torch.dtype, config: FusedMoEQuantConfig) -> Quantised | None:
    """How the factors of both products are stored for weights in `dtype`; None if the device does not multiply them."""
    if config.a1_scale is not None:
        return activation(dtype, PER_TENSOR)
    # vLLM would give all tokens of a step one scale if weights have one. A scale for each token does not depend on the
    # others, and is never larger.
    return activation(dtype, PER_ROW if config.block_shape is None else GroupShape(1, config.block_shape[1]))


def _given(layer: torch.nn.Module, factor: str, config: FusedMoEQuantConfig) -> torch.Tensor:
    """The scale of activations that the checkpoint gives. Experts share the largest."""
    scale = getattr(config, f"{factor}_scale").data.float().max().view(1, 1)
    check_scale(f"{layer.layer_name}.{WEIGHTS[factor]}_input_scale", scale, (1, 1), PER_TENSOR)
    return scale
