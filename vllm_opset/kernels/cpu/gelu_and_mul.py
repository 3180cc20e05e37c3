"""gelu_and_mul in two calls. gelu is rounded before the product, as in vLLM's own code, which the tolerance allows."""

import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.ops.activation._gated import halves
from vllm_opset.ops.activation.gelu_and_mul import check_approximation


@kernel(ops.gelu_and_mul, name="cpu")
def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    check_approximation(approximate)
    gate, up = halves(x)
    return F.gelu(gate, approximate=approximate).mul_(up).contiguous()
