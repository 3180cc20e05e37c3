"""gelu_new by npu_gelu with approximate="tanh". Source: its schema and CANN's page of aclnnGeluV2."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.ascend import _constraints
from vllm_opset.kernels.ascend._operators import npu
from vllm_opset.ops.contract import Problem


def supports(problem: Problem) -> str | None:
    """fp32, bf16 and fp16 on A2 and A3."""
    return _constraints.refused("npu_gelu", problem)


@kernel(ops.gelu_new, name="ascend", supports=supports)
def gelu_new(x: torch.Tensor) -> torch.Tensor:
    return npu.npu_gelu(x.contiguous(), approximate="tanh") if x.numel() else x.new_empty(x.shape)
