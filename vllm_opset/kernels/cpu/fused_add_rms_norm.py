"""fused_add_rms_norm in as few calls as PyTorch allows."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.cpu.rms_norm import inverse_rms
from vllm_opset.ops.norm.fused_add_rms_norm import check_arguments


@kernel(ops.fused_add_rms_norm, name="cpu")
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    weight_offset: float = 0.0,
) -> None:
    check_arguments(x, residual, weight)
    if weight is not None and weight_offset:
        weight = weight.float() + weight_offset
    if x.dtype is torch.float32:
        residual.add_(x)
        torch.mul(residual, inverse_rms(residual, epsilon), out=x)
        if weight is not None:
            x.mul_(weight)
        return
    total = x.float().add_(residual)
    residual.copy_(total)
    total.mul_(inverse_rms(total, epsilon))
    x.copy_(total if weight is None else total.mul_(weight))
