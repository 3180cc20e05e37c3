"""situ_and_mul: the gated activation of Kimi models (SituGLU).

Semantics: vLLM's `SituAndMul.forward_native`.
"""

import torch

from vllm_opset.ops.activation import _gated
from vllm_opset.ops.contract import accumulator, op


@op()
def situ_and_mul(x: torch.Tensor, beta: float = 1.0, linear_beta: float | None = None) -> torch.Tensor:
    """y = beta · tanh(a / beta) · sigmoid(a) · b, in fp32 and rounded once.

    a is the gate x[..., :d]. b is x[..., d:], or linear_beta · tanh(x[..., d:] / linear_beta) unless that is None.
    x: [..., 2 * d], any strides. Returns a new contiguous tensor [..., d] of x's dtype. Zero rows are allowed.
    Raises ValueError if the last dimension is odd.
    """
    gate, up = _gated.halves(x.to(accumulator(x)))
    if linear_beta is not None:
        up = soft_limit(up, linear_beta)
    return (soft_limit(gate, beta) * torch.sigmoid(gate) * up).to(x.dtype).contiguous()


def soft_limit(x: torch.Tensor, limit: float) -> torch.Tensor:
    """x for small values, and never beyond ±limit."""
    return limit * torch.tanh(x / limit)


_gated.complete(
    situ_and_mul, flops_per_element=20, variants=[{}, {"beta": 1.5, "linear_beta": 2.0}, {"linear_beta": 0.5}]
)
