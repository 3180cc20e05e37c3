"""vLLM's linear layers with int4 weights by groups (W4A16): compressed-tensors, GPTQ and AWQ.

vLLM loads the checkpoint and fuses its layers. The first two formats come through vLLM's own registration of kernels.
AWQ's method on a plugin's platform calls vLLM's kernels itself, so a subclass takes its place. Each format is converted
once to the layout of `ops/schemes`.
"""

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.kernels.linear import MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQLinearMethod
from vllm.scalar_type import scalar_types

from vllm_opset.model.loading import prefix_of
from vllm_opset.model.scaled_linear import ScaledLinear, call_of_layers
from vllm_opset.ops.schemes import (
    PER_ROW,
    UINT4,
    UINT4_BLOCK,
    GroupShape,
    Scheme,
    check_scale,
    is_int4_group,
    packed,
    quantised,
)

# The order in which AWQ packs eight outputs in an int32: output i is at the place AWQ_ORDER[i], from the low bits up.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class OpsetInt4LinearKernel(MPLinearKernel):
    """Serves int4 weights of compressed-tensors, with and without zero points, and of GPTQ, without them."""

    def __init__(self, c: MPLinearLayerConfig, *args, **kwargs) -> None:
        super().__init__(c, *args, **kwargs)
        self._call, self._linear = call_of_layers(), None

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if c.weight_type not in (scalar_types.uint4, scalar_types.uint4b8):
            return False, f"it serves weights of 4 bits, not {c.weight_type}"
        in_features = c.partition_weight_shape[0]
        if in_features % UINT4_BLOCK:
            return False, f"it serves multiples of {UINT4_BLOCK} input features, not {in_features}"
        by_groups = 0 < c.group_size < c.full_weight_shape[0]
        if by_groups and not is_int4_group(c.group_size):
            return False, f"it serves groups of a power of two from {UINT4_BLOCK} columns up, not of {c.group_size}"
        if by_groups and getattr(c, "has_g_idx", False):  # vLLM 0.30 and later refuse such weights
            return False, "it does not serve activation ordering by groups (act-order)"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        weight, scale = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        values = nibbles(weight.data.t() if weight.output_dim == 1 else weight.data)
        scales = scale.data.t() if scale.output_dim == 1 else scale.data
        zeros = nibbles(getattr(layer, self.w_zp_name).data.t()).t() if self.config.zero_points else None
        stored = _stored(f"{prefix_of(layer)}.{self.w_s_name}", values, scales, zeros, self.config.group_size)
        self._linear = ScaledLinear(self._call, **stored, dtype=self.config.act_type, before=self._linear)
        weight.data = weight.data.new_empty(0)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._linear(x, bias)


class OpsetAwqLinearMethod(AutoAWQLinearMethod):
    """Serves int4 weights of AWQ, with zero points."""

    def __init__(self, quant_config) -> None:
        super().__init__(quant_config)
        self._call, self._dtype = call_of_layers(), get_current_vllm_config().model_config.dtype
        self._linear = None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        values, zeros = (nibbles_of_awq(stored.data).t() for stored in (layer.qweight, layer.qzeros))
        scales, group = layer.scales.data.t(), self.quant_config.group_size
        stored = _stored(f"{prefix_of(layer)}.scales", values, scales, zeros, group)
        self._linear = ScaledLinear(self._call, **stored, dtype=self._dtype, before=self._linear)
        layer.qweight.data = layer.qweight.data.new_empty(0)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._linear(x, bias)


def nibbles(stored: torch.Tensor) -> torch.Tensor:
    """The values of 4 bits in int32s, from the low bits up: [rows, n] to uint8 [rows, 8 n]."""
    pairs = stored.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)


def nibbles_of_awq(stored: torch.Tensor) -> torch.Tensor:
    """The values of a matrix that AWQ packed along its outputs: [rows, n] to uint8 [rows, 8 n]."""
    return nibbles(stored).unflatten(1, (-1, len(AWQ_ORDER)))[:, :, AWQ_ORDER].flatten(1)


def _stored(
    scale_name: str, values: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | None, group_size: int
) -> dict[str, torch.Tensor | Scheme | None]:
    """The arguments of ScaledLinear for a weight with these values. Raises ValueError for a damaged scale, by its name.

    values: uint8 [out_features, in_features]. scale, and zeros in uint8: [out_features, groups]. group_size: the number
    of columns that share a scale, or WHOLE.
    """
    group = GroupShape(1, group_size) if 0 < group_size < values.shape[1] else PER_ROW
    check_scale(scale_name, scale, values.shape, group)
    weight, scale = packed(values, UINT4), scale.contiguous()
    zeros = None if zeros is None else zeros.contiguous()
    return {"weight": weight, "scale": scale, "scheme": Scheme(quantised(weight, scale, zeros)), "zero_point": zeros}
