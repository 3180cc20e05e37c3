"""mul_and_silu: SwiGLU with the halves in the other order, as Molmo stores them.

Semantics: vLLM's `MulAndSilu.forward_native`.
"""

import torch
import torch.nn.functional as F

from vllm_opset.ops.activation import _gated
from vllm_opset.ops.contract import accumulator, op


@op()
def mul_and_silu(x: torch.Tensor) -> torch.Tensor:
    """y = x[..., :d] * silu(x[..., d:]), with silu(a) = a / (1 + exp(−a)), in fp32 and rounded once.

    x: [..., 2 * d], any strides. Returns a new contiguous tensor [..., d] of x's dtype. Zero rows are allowed.
    Raises ValueError if the last dimension is odd.
    """
    up, gate = _gated.halves(x.to(accumulator(x)))
    return (up * F.silu(gate)).to(x.dtype).contiguous()


_gated.complete(mul_and_silu, flops_per_element=5)
