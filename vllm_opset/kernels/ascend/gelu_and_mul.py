"""gelu_and_mul by npu_geglu with activate_left, because by default it activates the right half.

Source: docs of npu_geglu (approximate: 0 is "none", 1 is "tanh"; two results, the second is gelu alone), its schema,
which has activate_left, and CANN's page of aclnnGeGluV3.
"""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.ascend import _constraints
from vllm_opset.kernels.ascend._operators import npu
from vllm_opset.ops.activation._gated import check_width
from vllm_opset.ops.activation.gelu_and_mul import APPROXIMATIONS, check_approximation
from vllm_opset.ops.contract import Problem


def supports(problem: Problem) -> str | None:
    """fp32, bf16 and fp16 on A2 and A3."""
    return _constraints.refused("npu_geglu", problem)


@kernel(ops.gelu_and_mul, name="ascend", supports=supports)
def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    check_approximation(approximate)
    check_width(x)
    if x.numel() == 0:
        return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    # The operator's numbers are the indices of the words in APPROXIMATIONS.
    y, _ = npu.npu_geglu(x.contiguous(), dim=-1, approximate=APPROXIMATIONS.index(approximate), activate_left=True)
    return y
