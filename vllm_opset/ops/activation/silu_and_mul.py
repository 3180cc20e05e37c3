"""silu_and_mul: the gated activation of Llama, Qwen and most others (SwiGLU).

Semantics: vLLM's `SiluAndMul.forward_native`.
"""

import torch
import torch.nn.functional as F

from vllm_opset.ops.activation import _gated
from vllm_opset.ops.contract import accumulator, op


@op()
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """y = silu(x[..., :d]) * x[..., d:], with silu(a) = a / (1 + exp(−a)), in fp32 and rounded once.

    x: [..., 2 * d], any strides. Returns a new contiguous tensor [..., d] of x's dtype. Zero rows are allowed.
    Raises ValueError if the last dimension is odd.
    """
    gate, up = _gated.halves(x.to(accumulator(x)))
    return (F.silu(gate) * up).to(x.dtype).contiguous()


_gated.complete(silu_and_mul, flops_per_element=5)
