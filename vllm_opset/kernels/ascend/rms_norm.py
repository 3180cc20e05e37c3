"""rms_norm by npu_rms_norm.

Source: docs of npu_rms_norm (see `_constraints`): fp16, bf16 and fp32, a weight of the same dtype, 2 to 8 dimensions.
With a weight in fp32, or with Gemma's weight + 1, the whole norm is computed in fp32. Not documented: whether the
operator multiplies by the weight before or after it rounds. The contract's tolerance allows both.
"""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.ascend import _constraints
from vllm_opset.kernels.ascend._operators import npu
from vllm_opset.kernels.ascend._rows import gamma, rows
from vllm_opset.ops.norm.rms_norm import RMSNormProblem, check_parameter


def supports(problem: RMSNormProblem) -> str | None:
    """fp32, bf16 and fp16 on A2, A3 and A5; fp32 and fp16 on 310P."""
    return _constraints.refused("npu_rms_norm", problem)


@kernel(ops.rms_norm, name="ascend", supports=supports)
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, weight_offset: float = 0.0) -> torch.Tensor:
    check_parameter(weight, x)
    if x.numel() == 0:
        return x.new_empty(x.shape)
    scale = gamma(x, weight, weight_offset)
    y, _ = npu.npu_rms_norm(rows(x, scale.dtype), scale, epsilon=epsilon)
    return y.view(x.shape).to(x.dtype)
