"""gelu_tanh: GELU by its tanh approximation, as SigLIP and Gemma's vision models use it.

Semantics: vLLM's `GELUTanh.forward_native`.
"""

import torch
import torch.nn.functional as F

from vllm_opset.ops.activation import _unary
from vllm_opset.ops.contract import accumulator, op


@op()
def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """y = x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))), in fp32 and rounded once.

    x: any shape and strides. Returns a new contiguous tensor of x's shape and dtype.
    """
    return F.gelu(x.to(accumulator(x)), approximate="tanh").to(x.dtype).contiguous()


_unary.complete(gelu_tanh, flops_per_element=9)
