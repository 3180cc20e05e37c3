"""gelu_new by PyTorch's own fused operator."""

import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import kernel


@kernel(ops.gelu_new, name="cpu")
def gelu_new(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh").contiguous()
