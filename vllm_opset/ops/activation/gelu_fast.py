"""gelu_fast: another name for `gelu_new`, with the polynomial factored.

Semantics: vLLM's `FastGELU.forward_native`. Models name either, so both are ops; their values agree.
"""

import torch

from vllm_opset.ops.activation import _unary
from vllm_opset.ops.activation.gelu_new import gelu_new
from vllm_opset.ops.contract import op


@op()
def gelu_fast(x: torch.Tensor) -> torch.Tensor:
    """y = x/2 · (1 + tanh(√(2/π) · x · (1 + 0.044715 x²))), in fp32 and rounded once.

    x: any shape and strides. Returns a new contiguous tensor of x's shape and dtype.
    """
    return gelu_new(x)


_unary.complete(gelu_fast, flops_per_element=9)
