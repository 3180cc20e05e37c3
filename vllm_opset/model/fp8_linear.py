"""vLLM's linear layers with fp8 weights, multiplied by ops.linear, through vLLM's own registration of kernels.

vLLM loads the checkpoint and fuses its layers, and gives the kernel the weight with its scales. Activations are
quantised as the checkpoint says on devices that multiply in fp8. On others they stay in the model's dtype, since
quantising them would only add an error.
"""

import torch
from vllm.model_executor.kernels.linear import FP8ScaledMMLinearKernel, FP8ScaledMMLinearLayerConfig
from vllm.platforms import current_platform

from vllm_opset import ops, selection
from vllm_opset.model.loading import prefix_of
from vllm_opset.model.scaled_linear import ScaledLinear, activation, call_of_layers
from vllm_opset.ops.quantisation.quantise import QuantiseProblem
from vllm_opset.ops.schemes import FP8, PER_ROW, PER_TENSOR, GroupShape, Quantised, Scheme, check_scale

# vLLM's checkpoints by blocks bring the first, and all others the second.
SCALES = ("weight_scale_inv", "weight_scale")


class OpsetFp8LinearKernel(FP8ScaledMMLinearKernel):
    """Serves fp8 e4m3 weights with a scale per tensor, per channel or by blocks."""

    def __init__(self, c: FP8ScaledMMLinearLayerConfig, *args, **kwargs) -> None:
        super().__init__(c, *args, **kwargs)
        self._call, self._linear = call_of_layers(), None

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        if c.weight_quant_key.dtype is not FP8:
            return False, f"it serves weights in {FP8}, not in {c.weight_quant_key.dtype}"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        group = self.config.weight_quant_key.scale.group_shape
        by_blocks = group.row > 0 and group.col > 0
        weight = layer.weight.data if by_blocks else layer.weight.data.t()
        name, scale = _scale_of(layer)
        if by_blocks:
            group = GroupShape(group.row, group.col)
        else:
            group = PER_TENSOR if scale is None or scale.numel() == 1 else PER_ROW
            scale = None if scale is None else scale.view(-1, 1)
        prefix = prefix_of(layer)
        check_scale(f"{prefix}.{name}", scale, weight.shape, group)
        scheme = Scheme(Quantised(FP8, group), self._activation())
        x_scale = self._static_scale(layer, prefix)
        out_dtype, before = self.config.out_dtype, self._linear
        self._linear = ScaledLinear(self._call, weight, scale, scheme, out_dtype, x_scale, before=before)
        if not self._linear.needs_given:
            layer.weight.data = weight.new_empty(0)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._linear(x, bias)

    def _activation(self) -> Quantised | None:
        scale = self.config.activation_quant_key.scale
        group = GroupShape(scale.group_shape.row, scale.group_shape.col)
        if group == PER_TENSOR and not scale.static:
            # All tokens of a step would share the scale, also with those that fill up a captured graph, which are not
            # initialised. A scale for each token does not depend on the others, and is never larger.
            group = PER_ROW
        return activation(FP8, group)

    def _static_scale(self, layer: torch.nn.Module, prefix: str) -> torch.Tensor | None:
        """The scale of activations, if the checkpoint gives it."""
        if not self.config.activation_quant_key.scale.static:
            return None
        scale = layer.input_scale.data.float().view(1, 1)
        check_scale(f"{prefix}.input_scale", scale, (1, 1), PER_TENSOR)
        return scale

    def apply_scaled_mm(self, **arguments) -> torch.Tensor:
        raise NotImplementedError("apply_weights multiplies")


def _scale_of(layer: torch.nn.Module) -> tuple[str, torch.Tensor | None]:
    """The name and the values of a layer's scales, in fp32; None if it has none."""
    for name in SCALES:
        scale = getattr(layer, name, None)
        if scale is not None:
            return name, scale.data.float()
    return SCALES[-1], None


def scaled_fp8_quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: torch.Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's `_custom_ops.scaled_fp8_quant` by ops.quantise, as vLLM calls it for weights that are being loaded.

    Raises NotImplementedError for arguments that only activations have.
    """
    if num_token_padding or scale_ub is not None or output is not None or group_shape is not None:
        raise NotImplementedError("vllm-opset quantises weights with scales per tensor and per row")
    group = PER_ROW if scale is None and use_per_token_if_dynamic else PER_TENSOR
    problem = QuantiseProblem(current_platform.device_type, input.dtype, FP8, group, scale is not None, input.shape[1])
    run = selection.select(ops.quantise, problem).run
    values, scales = run(input, FP8, list(group), None if scale is None else scale.float().view(1, 1))
    return values, scales if group is PER_ROW else scales.view(1)
