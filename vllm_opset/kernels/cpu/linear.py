"""linear with a weight that oneDNN packs once for the processor, instead of reordering it at every call.

Decode multiplies the whole weight by a handful of tokens, so reordering the weight costs as much as the product.
"""

import torch
import torch.nn.functional as F

from vllm_opset import ops, targets
from vllm_opset.kernel import kernel
from vllm_opset.ops.gemm.linear import LinearProblem, check_arguments
from vllm_opset.ops.schemes import FP8, INT8, UINT4, dequantise
from vllm_opset.targets import ONEDNN

onednn = torch.ops.mkldnn
# The number of tokens that oneDNN packs for. The packed weight works for any number, but a weight packed for one token
# is slower with more.
PACKED_FOR_TOKENS = 16
# The bytes of a weight that stays in the cache of a core.
CACHED_BYTES = 512 << 10


def supports(problem: LinearProblem) -> str | None:
    """fp32, and bf16 and fp16 where oneDNN multiplies in them; fp8, int8 and int4 weights, dequantised once."""
    features = problem.target.features
    if problem.scheme.weight is not None:
        known = problem.scheme.weight.dtype in (FP8, INT8, UINT4)
        return None if known else f"it dequantises fp8 e4m3, int8 and int4, not {problem.scheme.weight}"
    if ONEDNN[torch.float32] not in features:
        return "this PyTorch has no oneDNN"
    if ONEDNN.get(problem.dtype) not in features:
        return f"oneDNN does not multiply in {problem.dtype} on this processor"
    return None


def pack(
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    weight_zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weight in oneDNN's packed form, which keeps its shape. A quantised weight is dequantised before.

    A weight of 4 bits then has the shape of the matrix that it stands for.

    Processors have no fp8 arithmetic. PyTorch's `_scaled_mm` would widen the whole weight at every call, which took
    3.5 times as long as the product of 16 tokens with a packed bf16 weight.
    """
    if weight_scale is not None and out_dtype is not None:
        weight = dequantise(weight, weight_scale, out_dtype, weight_zero_point)
    # For a cached weight in fp32, oneDNN takes longer to begin than MKL to finish.
    in_cache = weight.dtype is torch.float32 and weight.nbytes <= CACHED_BYTES
    if in_cache or ONEDNN.get(weight.dtype) not in targets.of(weight.device.type).features:
        return weight
    return onednn._reorder_linear_weight(weight, PACKED_FOR_TOKENS)


@kernel(ops.linear, name="cpu", supports=supports, prepare={"weight": pack})
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    weight_zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    check_arguments(x, weight, bias, weight_scale, x_scale, out_dtype, weight_zero_point)
    if x_scale is not None:
        x = dequantise(x, x_scale, out_dtype)
    if weight.is_mkldnn:
        return onednn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias).contiguous()
