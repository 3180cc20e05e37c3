"""linear with a weight that oneDNN keeps packed for the processor, instead of arranging it at every call.

Decoding multiplies the whole weight by a handful of tokens, so arranging it costs as much as multiplying.
"""

import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.ops.contract import Problem
from vllm_opset.ops.gemm.linear import check_arguments

onednn = torch.ops.mkldnn
# What tells whether oneDNN multiplies in that dtype on this processor; in fp32 it does on any.
HALF_PRECISION = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
# Tokens that oneDNN packs for. The packed weight is right for any number; with 1 it is slower for more.
USUAL_TOKENS = 16
# An fp32 weight that stays in a core's cache: there oneDNN takes longer to begin than MKL to finish.
SMALL = 512 << 10


def supports(problem: Problem) -> str | None:
    """fp32, and bf16 and fp16 where oneDNN multiplies in them."""
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch has no oneDNN"
    if problem.dtype is torch.float32:
        return None
    if problem.dtype in HALF_PRECISION and getattr(onednn, HALF_PRECISION[problem.dtype])():
        return None
    return f"oneDNN does not multiply in {problem.dtype} on this processor"


def pack(weight: torch.Tensor) -> torch.Tensor:
    """As oneDNN wants it; it knows the shape still."""
    if weight.dtype is torch.float32 and weight.nbytes <= SMALL:
        return weight
    return onednn._reorder_linear_weight(weight, USUAL_TOKENS)


@kernel(ops.linear, name="cpu", supports=supports, prepare={"weight": pack})
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    check_arguments(x, weight, bias)
    if weight.is_mkldnn:
        return onednn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias).contiguous()
