"""gelu_fast by the operator of `gelu_new`, which has the same values. npu_fast_gelu differs: see `quick_gelu`."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.ascend.gelu_new import gelu_new, supports


@kernel(ops.gelu_fast, name="ascend", supports=supports)
def gelu_fast(x: torch.Tensor) -> torch.Tensor:
    return gelu_new(x)
