"""relu2: the square of ReLU, as Nemotron uses it.

Semantics: vLLM's `ReLUSquaredActivation.forward_native`.
"""

import torch

from vllm_opset.ops.activation import _unary
from vllm_opset.ops.contract import accumulator, op


@op()
def relu2(x: torch.Tensor) -> torch.Tensor:
    """y = max(x, 0)², in fp32 and rounded once.

    x: any shape and strides. Returns a new contiguous tensor of x's shape and dtype. Values that overflow become inf.
    """
    wide = x.to(accumulator(x))
    return wide.relu().square().to(x.dtype).contiguous()


_unary.complete(relu2, flops_per_element=2)
