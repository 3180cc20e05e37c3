"""gelu by PyTorch's own fused operator."""

import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import kernel


@kernel(ops.gelu, name="cpu")
def gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x).contiguous()
