"""silu_and_mul by npu_swiglu.

Source: docs of npu_swiglu: x · sigmoid(x) of the first half along a dimension, times the second half; fp32, fp16 and
bf16, 1 to 8 dimensions.
"""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.ascend import _constraints
from vllm_opset.kernels.ascend._operators import npu
from vllm_opset.ops.activation._gated import check_width
from vllm_opset.ops.contract import Problem


def supports(problem: Problem) -> str | None:
    """fp32, bf16 and fp16 on A2 and A3."""
    return _constraints.refused("npu_swiglu", problem)


@kernel(ops.silu_and_mul, name="ascend", supports=supports)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    check_width(x)
    if x.numel() == 0:
        return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    return npu.npu_swiglu(x.contiguous(), dim=-1)
