"""linear with a weight that oneDNN packs once for the processor, instead of reordering it at every call.

Decode multiplies the whole weight by a handful of tokens, so reordering the weight costs as much as the product.
"""

import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.ops.contract import Problem
from vllm_opset.ops.gemm.linear import check_arguments
from vllm_opset.targets import ONEDNN

onednn = torch.ops.mkldnn
# The number of tokens that oneDNN packs for. The packed weight works for any number, but a weight packed for one token
# is slower with more.
PACKED_FOR_TOKENS = 16
# The bytes of an fp32 weight that stays in the cache of a core. For such a weight, oneDNN takes longer to begin than
# MKL to finish.
CACHED_BYTES = 512 << 10


def supports(problem: Problem) -> str | None:
    """fp32, and bf16 and fp16 where oneDNN multiplies in them."""
    features = problem.target.features
    if ONEDNN[torch.float32] not in features:
        return "this PyTorch has no oneDNN"
    if ONEDNN.get(problem.dtype) not in features:
        return f"oneDNN does not multiply in {problem.dtype} on this processor"
    return None


def pack(weight: torch.Tensor) -> torch.Tensor:
    """The weight in oneDNN's packed form, which keeps its shape."""
    if weight.dtype is torch.float32 and weight.nbytes <= CACHED_BYTES:
        return weight
    return onednn._reorder_linear_weight(weight, PACKED_FOR_TOKENS)


@kernel(ops.linear, name="cpu", supports=supports, prepare={"weight": pack})
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    check_arguments(x, weight, bias)
    if weight.is_mkldnn:
        return onednn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias).contiguous()
