"""gelu: GELU by the normal distribution function.

Semantics: vLLM's `GELU.forward_native`.
"""

import torch
import torch.nn.functional as F

from vllm_opset.ops.activation import _unary
from vllm_opset.ops.contract import accumulator, op


@op()
def gelu(x: torch.Tensor) -> torch.Tensor:
    """y = x/2 · (1 + erf(x / √2)), in fp32 and rounded once.

    x: any shape and strides. Returns a new contiguous tensor of x's shape and dtype.
    """
    return F.gelu(x.to(accumulator(x))).to(x.dtype).contiguous()


_unary.complete(gelu, flops_per_element=10)
