"""gelu_new: GELU by its tanh approximation, as GPT-2 uses it.

Semantics: vLLM's `NewGELU.forward_native`, which is `torch.nn.functional.gelu(approximate="tanh")`.
"""

import math

import torch

from vllm_opset.ops.activation import _unary
from vllm_opset.ops.contract import accumulator, op


@op()
def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """y = x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))), in fp32 and rounded once.

    x: any shape and strides. Returns a new contiguous tensor of x's shape and dtype.
    """
    wide = x.to(accumulator(x))
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    return (0.5 * wide * (1 + torch.tanh(inner))).to(x.dtype).contiguous()


_unary.complete(gelu_new, flops_per_element=9)
