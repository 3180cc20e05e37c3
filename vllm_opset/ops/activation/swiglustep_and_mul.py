"""swiglustep_and_mul: SwiGLU whose gate and up are clamped after the activation.

Semantics: vLLM's `SwigluStepAndMul.forward_native`.
"""

import torch
import torch.nn.functional as F

from vllm_opset.ops.activation import _gated
from vllm_opset.ops.contract import accumulator, op


@op()
def swiglustep_and_mul(x: torch.Tensor, limit: float = 7.0) -> torch.Tensor:
    """y = min(silu(x[..., :d]), limit) * clamp(x[..., d:], −limit, limit), in fp32 and rounded once.

    x: [..., 2 * d], any strides. Returns a new contiguous tensor [..., d] of x's dtype. Zero rows are allowed.
    Raises ValueError if the last dimension is odd.
    """
    gate, up = _gated.halves(x.to(accumulator(x)))
    return (F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)).to(x.dtype).contiguous()


_gated.complete(swiglustep_and_mul, flops_per_element=8, variants=[{}, {"limit": 0.5}])
