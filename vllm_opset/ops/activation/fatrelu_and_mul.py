"""fatrelu_and_mul: the gated activation of MiniCPM-S, ReLU with a threshold.

Semantics: vLLM's `FatreluAndMul.forward_native`.
"""

import torch
import torch.nn.functional as F

from vllm_opset.ops.activation import _gated
from vllm_opset.ops.contract import accumulator, op


@op()
def fatrelu_and_mul(x: torch.Tensor, threshold: float = 0.0) -> torch.Tensor:
    """y = a * x[..., d:], where a is the gate x[..., :d], or 0 for a gate up to the threshold. In fp32, rounded once.

    x: [..., 2 * d], any strides. Returns a new contiguous tensor [..., d] of x's dtype. Zero rows are allowed.
    Raises ValueError if the last dimension is odd.
    """
    gate, up = _gated.halves(x.to(accumulator(x)))
    return (F.threshold(gate, threshold, 0.0) * up).to(x.dtype).contiguous()


_gated.complete(fatrelu_and_mul, flops_per_element=1, variants=[{}, {"threshold": 0.5}])
