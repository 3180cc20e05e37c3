"""linear with a weight that is arranged for the processor once, instead of at every call.

Decoding multiplies the whole weight by a handful of tokens, so arranging it costs as much as multiplying. In half
precision oneDNN keeps the weight packed. In fp32 MKL gains nothing by that; there the weight is the left factor where
tokens are few, and so read as it lies: yᵀ = weight xᵀ.
"""

import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.ops.contract import Problem
from vllm_opset.ops.linear import check_bias

onednn = torch.ops.mkldnn
# What tells whether oneDNN multiplies in that dtype on this processor.
PACKED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
# Tokens that oneDNN packs for. The packed weight is right for any number; with 1 it is slower for more.
USUAL_TOKENS = 16
# The numbers of tokens at which the weight is better the left factor in fp32, if it comes from memory: MKL has ways of
# its own with fewer, and beyond, arranging it pays. One that stays in a core's cache is arranged faster than the result
# is transposed.
FEW = range(12, 49)
STAYS_IN_CACHE = 512 << 10


def supports(problem: Problem) -> str | None:
    """fp32, and bf16 and fp16 where oneDNN multiplies in them."""
    if problem.dtype is torch.float32:
        return None
    if problem.dtype in PACKED and torch.backends.mkldnn.is_available() and getattr(onednn, PACKED[problem.dtype])():
        return None
    return f"oneDNN does not multiply in {problem.dtype} on this processor"


def pack(weight: torch.Tensor) -> torch.Tensor:
    """As oneDNN wants it; it knows the shape still."""
    return weight if weight.dtype is torch.float32 else onednn._reorder_linear_weight(weight, USUAL_TOKENS)


@kernel(ops.linear, name="cpu", supports=supports, prepare={"weight": pack})
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    check_bias(weight, bias)
    if weight.is_mkldnn:
        return onednn._linear_pointwise(x, weight, bias, "none", [], "")
    if x.ndim == 2 and x.shape[0] in FEW and weight.nbytes > STAYS_IN_CACHE:
        y = torch.mm(weight, x.t()) if bias is None else torch.addmm(bias[:, None], weight, x.t())
        return y.t().contiguous()
    return F.linear(x, weight, bias).contiguous()
