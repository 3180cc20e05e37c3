"""silu_and_mul_with_clamp: SwiGLU with clamped inputs, as some mixture-of-experts models use it.

Semantics: vLLM's `SiluAndMulWithClamp.forward_native`; `limit` is the layer's `swiglu_limit`.
"""

import torch

from vllm_opset.ops.activation import _gated
from vllm_opset.ops.contract import accumulator, op


@op()
def silu_and_mul_with_clamp(x: torch.Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0) -> torch.Tensor:
    """y = g · sigmoid(alpha · g) · (u + beta), with g = min(x[..., :d], limit) and u = x[..., d:] clamped to ±limit.

    Computed in fp32 and rounded once. With the defaults of alpha and beta, y = silu(g) · u.

    x: [..., 2 * d], any strides. Returns a new contiguous tensor [..., d] of x's dtype. Zero rows are allowed.
    Raises ValueError if the last dimension is odd.
    """
    gate, up = _gated.halves(x.to(accumulator(x)))
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + beta)).to(x.dtype).contiguous()


_gated.complete(
    silu_and_mul_with_clamp,
    flops_per_element=10,
    variants=({"limit": 7.0}, {"limit": 1.0, "alpha": 1.702, "beta": 1.0}),
)
