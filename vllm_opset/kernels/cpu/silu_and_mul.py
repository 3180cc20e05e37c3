"""silu_and_mul in two calls. As in vLLM, silu is rounded before the product. The tolerance of the op allows this."""

import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.ops.activation._gated import halves


@kernel(ops.silu_and_mul, name="cpu")
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = halves(x)
    return F.silu(gate).mul_(up).contiguous()
