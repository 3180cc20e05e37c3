"""linear with a weight that oneDNN packs once for the processor, instead of reordering it at every call.

Decode multiplies the whole weight by a handful of tokens, so reordering the weight costs as much as the product.
"""

import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.ops.contract import Problem
from vllm_opset.ops.gemm.linear import check_arguments

onednn = torch.ops.mkldnn
# The functions that tell whether oneDNN multiplies in a dtype on this processor. In fp32 it does on every processor.
HALF_PRECISION = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
# The number of tokens that oneDNN packs for. The packed weight works for any number, but a weight packed for one token
# is slower with more.
USUAL_TOKENS = 16
# The bytes of an fp32 weight that stays in the cache of a core. For such a weight, oneDNN takes longer to begin than
# MKL to finish.
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
    """The weight in oneDNN's packed form, which keeps its shape."""
    if weight.dtype is torch.float32 and weight.nbytes <= SMALL:
        return weight
    return onednn._reorder_linear_weight(weight, USUAL_TOKENS)


@kernel(ops.linear, name="cpu", supports=supports, prepare={"weight": pack})
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    check_arguments(x, weight, bias)
    if weight.is_mkldnn:
        return onednn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias).contiguous()
