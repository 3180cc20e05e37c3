"""linear in fp32 for few tokens: it reads the weight once, without packing. PyTorch does the rest, with that weight.

Many tokens go to oneDNN: on processors that are not Intel's, MKL takes twice as long.
"""

import torch
import torch.nn.functional as F

from vllm_opset import ops, targets
from vllm_opset.kernel import kernel
from vllm_opset.kernels.cpp._build import INT, POINTER, function
from vllm_opset.ops.gemm.linear import LinearProblem, check_arguments
from vllm_opset.ops.schemes import NONE
from vllm_opset.targets import ONEDNN

onednn = torch.ops.mkldnn
# The most tokens for which reading the plain weight once was faster than PyTorch, with weights that come from memory.
FEW_TOKENS = 32
# The bytes of a weight that stays in the cache of a core. For one token, MKL is as fast with such a weight.
CACHED_BYTES = 512 << 10

run = function("linear", *[POINTER] * 4, *[INT] * 4)


def supports(problem: LinearProblem) -> str | None:
    """fp32, not quantised."""
    if problem.scheme != NONE:
        return "not built for quantised weights: kernels/cpu dequantises them once"
    if problem.dtype is torch.float32:
        return None
    return f"not built for {problem.dtype}: the packed weights of kernels/cpu use the processor's matrix units"


@kernel(ops.linear, name="cpp", supports=supports)
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    weight_scale: None = None,
    x_scale: None = None,
    out_dtype: None = None,
    weight_zero_point: None = None,
) -> torch.Tensor:
    check_arguments(x, weight, bias, weight_scale, x_scale, out_dtype, weight_zero_point)
    if x.ndim != 2 or x.stride(1) != 1 or not weight.is_contiguous() or not len(x):
        return F.linear(x, weight, bias).contiguous()
    if len(x) > FEW_TOKENS and ONEDNN[torch.float32] in targets.of("cpu").features:
        return onednn._linear_pointwise(x, weight, bias, "none", [], "")
    if len(x) > FEW_TOKENS or (len(x) == 1 and weight.nbytes <= CACHED_BYTES):
        return F.linear(x, weight, bias).contiguous()
    bias = None if bias is None else bias.contiguous()
    (num_tokens, in_features), out_features = x.shape, weight.shape[0]
    y = torch.empty((num_tokens, out_features), dtype=torch.float32)
    run(
        x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
        num_tokens, in_features, out_features, x.stride(0),
    )  # fmt: skip
    return y
