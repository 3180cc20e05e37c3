"""fused_add_rms_norm by npu_add_rms_norm, in fp32 whatever the dtype.

Source: its schema, (y, rstd, x1 + x2), and CANN's page of aclnnAddRmsNorm; docs have no page of it. The two inputs and
the weight have one dtype. In 16 bits, A2 and A3 round the sum before they normalise it, according to the reference
results in the tests of CANN's ops-nn. The contract normalises the unrounded sum. In fp32 there is no difference, so
this kernel converts both inputs. It copies the results to x and residual: npu_add_rms_norm_v2 writes in place, but no
document says which result goes where.
"""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.ascend import _constraints
from vllm_opset.kernels.ascend._operators import npu
from vllm_opset.kernels.ascend._rows import gamma, rows
from vllm_opset.ops.norm.fused_add_rms_norm import check_arguments
from vllm_opset.ops.norm.rms_norm import RMSNormProblem


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
    both = rows(x, torch.float32), rows(residual, torch.float32)
    scale = gamma(x, weight, weight_offset).float()
    y, _, total = npu.npu_add_rms_norm(*both, scale, epsilon=epsilon)
    x.copy_(y.view(x.shape))
    residual.copy_(total.view(x.shape))
