"""vLLM's linear layers with int8 weights and activations (W8A8), through vLLM's own registration of kernels.

vLLM loads the checkpoint and fuses its layers. Activations are quantised as the checkpoint says on devices that
multiply in int8. On others they stay in the model's dtype, since quantising them would only add an error.
"""

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.kernels.linear import Int8ScaledMMLinearKernel, Int8ScaledMMLinearLayerConfig

from vllm_opset.model.loading import prefix_of
from vllm_opset.model.scaled_linear import ScaledLinear, activation, call_of_layers
from vllm_opset.ops.schemes import INT8, PER_ROW, PER_TENSOR, Quantised, Scheme, check_scale


class OpsetInt8LinearKernel(Int8ScaledMMLinearKernel):
    """Serves symmetric int8 weights with a scale per tensor or per channel."""

    def __init__(self, c: Int8ScaledMMLinearLayerConfig, *args, **kwargs) -> None:
        super().__init__(c, *args, **kwargs)
        self._call, self._dtype = call_of_layers(), get_current_vllm_config().model_config.dtype
        self._linear = None

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        if not c.input_symmetric:
            return False, "it quantises activations symmetrically, without a zero point"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        weight, scale = layer.weight.data, _scale_of(layer)
        prefix, group = prefix_of(layer), PER_TENSOR if scale.numel() == 1 else PER_ROW
        check_scale(f"{prefix}.weight_scale", scale, weight.shape, group)
        x_scale = None
        if self.config.is_static_input_scheme:
            x_scale = layer.input_scale.data.float().max().view(1, 1)
            check_scale(f"{prefix}.input_scale", x_scale, (1, 1), PER_TENSOR)
        stored = activation(INT8, PER_ROW if x_scale is None else PER_TENSOR)
        scheme = Scheme(Quantised(INT8, group), stored)
        self._linear = ScaledLinear(self._call, weight, scale, scheme, self._dtype, x_scale, before=self._linear)
        if not self._linear.needs_given:
            layer.weight.data = weight.new_empty(0)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._linear(x, bias)


def _scale_of(layer: torch.nn.Module) -> torch.Tensor:
    """The weight's scales in fp32, [out_features, 1] or [1, 1]. Fused layers with one each get one for each channel."""
    scale, widths = layer.weight_scale.data.float(), layer.logical_widths
    if scale.numel() == len(widths) > 1:
        scale = scale.flatten().repeat_interleave(torch.tensor(widths, device=scale.device))
    return scale.view(-1, 1)
