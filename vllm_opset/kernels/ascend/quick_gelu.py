"""quick_gelu by npu_fast_gelu.

Source: docs of npu_fast_gelu: x / (1 + exp(−1.702 x)) on A2 and A3. On 310P it is x / (1 + exp(−1.702 |x|)) ·
exp(0.851 (x − |x|)), which is the same function.
"""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.ascend import _constraints
from vllm_opset.kernels.ascend._operators import npu
from vllm_opset.ops.contract import Problem


def supports(problem: Problem) -> str | None:
    """fp32, bf16 and fp16 on A2 and A3; fp32 and fp16 on 310P."""
    return _constraints.refused("npu_fast_gelu", problem)


@kernel(ops.quick_gelu, name="ascend", supports=supports)
def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return npu.npu_fast_gelu(x.contiguous()) if x.numel() else x.new_empty(x.shape)
