"""gelu_and_mul in two calls. As in vLLM, gelu is rounded before the product. The tolerance of the op allows this."""

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
