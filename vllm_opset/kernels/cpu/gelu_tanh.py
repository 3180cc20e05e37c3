"""gelu_tanh by PyTorch's own fused operator."""

import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import kernel


@kernel(ops.gelu_tanh, name="cpu")
def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh").contiguous()
