"""fused_add_rms_norm_quant: the launch of `rms_norm_quant`, which first adds to the residual."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton.rms_norm_quant import normalise, supports
from vllm_opset.ops.norm.fused_add_rms_norm_quant import check_arguments


@kernel(ops.fused_add_rms_norm_quant, name="triton", supports=supports)
def fused_add_rms_norm_quant(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    to_dtype: torch.dtype,
    group_shape: list[int],
    scale: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_arguments(x, residual, weight, to_dtype, group_shape, scale, out)
    launch = "fused_add_rms_norm_quant"
    return normalise(launch, x, residual, weight, epsilon, weight_offset, to_dtype, group_shape, scale, out)
