"""linear in fp32 and bf16. Quantised weights are dequantised once, as by kernels/cpu.

In fp32, few tokens read the weight once, without packing. PyTorch does the rest, with that weight. Many tokens go to
oneDNN: on processors that are not Intel's, MKL takes twice as long.

In bf16, the weight is packed once: rows side by side, in pairs of columns (linear_bf16.cpp).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from vllm_opset import ops, targets
from vllm_opset.kernel import kernel
from vllm_opset.kernels.cpp._build import INT, POINTER, TYPES, function
from vllm_opset.kernels.cpu import linear as in_torch
from vllm_opset.ops.gemm.linear import LinearProblem, check_arguments
from vllm_opset.ops.schemes import dequantise
from vllm_opset.targets import AMX, ONEDNN

onednn = torch.ops.mkldnn
# The most tokens for which reading the plain weight once was faster than PyTorch, with weights that come from memory.
FEW_TOKENS = 32
# The bytes of a weight that stays in the cache of a core. For one token in fp32, MKL is as fast with such a weight. In
# bf16, oneDNN takes longer to begin than to multiply few tokens by it.
CACHED_BYTES = 512 << 10
LANES = 16  # as in _vector.h

run = function("linear", *[POINTER] * 4, *[INT] * 4)
run_packed = function("linear_bf16", *[POINTER] * 4, *[INT] * 4)


def supports(problem: LinearProblem) -> str | None:
    """fp32, and bf16 by 16 rows and 2 columns; with AMX, up to 512 KiB of it. Quantised weights, dequantised once."""
    if problem.dtype not in TYPES:
        return f"not built for {problem.dtype}: kernels/cpu uses the processor's instructions for it"
    if problem.scheme.weight is not None and (reason := in_torch.supports(problem)):
        return reason
    return _refuse_packed(problem) if problem.dtype is torch.bfloat16 else None


def _refuse_packed(problem: LinearProblem) -> str | None:
    rows, columns, target = problem.out_features, problem.in_features, problem.target
    if rows % LANES or columns % 2:
        return f"{rows} rows and {columns} columns are no multiples of {LANES} and 2"
    # Processors beyond x86 have matrix instructions for bf16 too.
    has_matrix_instructions = AMX in target.features or target.architecture != "x86_64"
    if has_matrix_instructions and rows * columns * problem.dtype.itemsize > CACHED_BYTES:
        return "the packed weights of kernels/cpu use the processor's matrix instructions, which pays for large weights"
    return None


def pack(
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    weight_zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weight, dequantised if necessary.

    One in bf16 keeps its shape and holds [out_features / LANES, in_features / 2, LANES, 2] in it.
    """
    if weight_scale is not None and out_dtype is not None:
        weight = dequantise(weight, weight_scale, out_dtype, weight_zero_point)
    if weight.dtype is not torch.bfloat16:
        return weight
    panels = weight.unflatten(0, (-1, LANES)).unflatten(2, (-1, 2)).transpose(1, 2)
    return panels.contiguous().view(weight.shape)


@kernel(ops.linear, name="cpp", supports=supports, prepare={"weight": pack})
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
    if weight.dtype is torch.bfloat16:
        return _packed(x, weight, bias)
    if x.ndim != 2 or x.stride(1) != 1 or not weight.is_contiguous() or not len(x):
        return F.linear(x, weight, bias).contiguous()
    if len(x) > FEW_TOKENS and ONEDNN[torch.float32] in targets.of("cpu").features:
        return onednn._linear_pointwise(x, weight, bias, "none", [], "")
    if len(x) > FEW_TOKENS or (len(x) == 1 and weight.nbytes <= CACHED_BYTES):
        return F.linear(x, weight, bias).contiguous()
    return _called(run, x, weight, bias)


def _packed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    y = _called(run_packed, rows if rows.stride(1) == 1 else rows.contiguous(), weight, bias)
    return y if x.ndim == 2 else y.view(*x.shape[:-1], len(weight))


def _called(run: Callable, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The result of a function of the library for x [num_tokens, in_features] with dense rows."""
    bias = None if bias is None else bias.contiguous()
    (num_tokens, in_features), out_features = x.shape, weight.shape[0]
    y = torch.empty((num_tokens, out_features), dtype=x.dtype)
    run(
        x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
        num_tokens, in_features, out_features, x.stride(0),
    )  # fmt: skip
    return y
