"""swigluoai_and_mul: the clamped gated activation of gpt-oss, whose gate and up alternate along the last dimension.

Semantics: vLLM's `SwigluOAIAndMul.forward_native`.
"""

import torch

from vllm_opset.ops.activation import _gated
from vllm_opset.ops.contract import accumulator, op


@op()
def swigluoai_and_mul(x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """y = g · sigmoid(alpha · g) · (u + 1), with g = min(x[..., ::2], limit) and u = x[..., 1::2] clamped to ±limit.

    Gate and up are interleaved; they are not the two halves. Computed in fp32 and rounded once.

    x: [..., 2 * d], any strides. Returns a new contiguous tensor [..., d] of x's dtype. Zero rows are allowed.
    Raises ValueError if the last dimension is odd.
    """
    _gated.check_width(x)
    wide = x.to(accumulator(x))
    gate, up = wide[..., ::2].clamp(max=limit), wide[..., 1::2].clamp(min=-limit, max=limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(x.dtype).contiguous()


_gated.complete(swigluoai_and_mul, flops_per_element=10, variants=({}, {"alpha": 1.5, "limit": 1.0}))
