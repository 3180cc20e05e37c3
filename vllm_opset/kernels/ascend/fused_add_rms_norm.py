"""fused_add_rms_norm by npu_add_rms_norm.

Source: its schema, (y, rstd, x1 + x2), and CANN's page of aclnnAddRmsNorm; docs have no page of it. Two inputs and a
weight of one dtype. A weight in fp32, and Gemma's weight + 1, have all of it computed in fp32. The results are copied
to x and residual: npu_add_rms_norm_v2 writes in place, but nothing says which result goes where.
Not documented: whether the norm is that of the sum before it is rounded, as the contract wants it, or after. The two
differ by less than the tolerance; the contract's law `norm_of_the_unrounded_sum` tells them apart on hardware.
"""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.ascend import _constraints
from vllm_opset.kernels.ascend._operators import npu
from vllm_opset.kernels.ascend._rows import gamma, rows
from vllm_opset.ops.fused_add_rms_norm import check_arguments
from vllm_opset.ops.rms_norm import RMSNormProblem


def supports(problem: RMSNormProblem) -> str | None:
    """fp32, bf16 and fp16 on A2 and A3."""
    return _constraints.refused("npu_add_rms_norm", problem)


@kernel(ops.fused_add_rms_norm, name="ascend", supports=supports)
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    weight_offset: float = 0.0,
) -> None:
    check_arguments(x, residual, weight)
    if x.numel() == 0:
        return
    scale = gamma(x, weight, weight_offset)
    both = rows(x, scale.dtype), rows(residual, scale.dtype)
    y, _, total = npu.npu_add_rms_norm(*both, scale, epsilon=epsilon)
    x.copy_(y.view(x.shape))
    residual.copy_(total.view(x.shape))
