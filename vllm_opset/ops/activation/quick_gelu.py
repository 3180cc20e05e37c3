"""quick_gelu: GELU approximated by a sigmoid, as CLIP uses it.

Semantics: vLLM's `QuickGELU.forward_native`.
"""

import torch

from vllm_opset.ops.activation import _unary
from vllm_opset.ops.contract import accumulator, op


@op()
def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """y = x · sigmoid(1.702 x), in fp32 and rounded once.

    x: any shape and strides. Returns a new contiguous tensor of x's shape and dtype.
    """
    wide = x.to(accumulator(x))
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype).contiguous()


_unary.complete(quick_gelu, flops_per_element=5)
