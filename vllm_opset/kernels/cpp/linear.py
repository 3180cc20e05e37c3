"""linear in fp32 and bf16. Quantised weights stay quantised, and are dequantised where they are multiplied.

In fp32, few tokens read the weight once, without packing. PyTorch does the rest, with that weight, or with blocks of a
quantised one. Many tokens go to oneDNN: on processors that are not Intel's, MKL takes twice as long.

In bf16, the weight is packed once: rows side by side, in pairs of columns (linear_bf16.cpp).
"""

import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F

from vllm_opset import ops, targets
from vllm_opset.kernel import kernel
from vllm_opset.kernels.cpp._build import INT, POINTER, function
from vllm_opset.kernels.cpp._stored import Weight, can_stay, described, is_stored, panels, stored_panels
from vllm_opset.kernels.cpp._types import LANES, TYPES
from vllm_opset.kernels.cpu import linear as in_torch
from vllm_opset.ops.gemm.linear import LinearProblem, check_arguments
from vllm_opset.ops.schemes import PACKED, dequantise, quantised, values_shape
from vllm_opset.targets import AMX, ONEDNN

onednn = torch.ops.mkldnn
# The most tokens for which reading the plain weight once was faster than PyTorch, with weights that come from memory.
FEW_TOKENS = 32
# The bytes of the rows that are dequantised at a time for many tokens.
BLOCK_BYTES = 4 << 20

run = function("linear", *[POINTER] * 4, *[INT] * 4)
run_packed = function("linear_bf16", *[POINTER] * 4, *[INT] * 4)
run_stored = {
    torch.float32: function("linear_stored", *[POINTER] * 4, *[INT] * 4),
    torch.bfloat16: function("linear_bf16_stored", *[POINTER] * 4, *[INT] * 4),
}
MULTIPLIES_BF16 = bool(function("multiplies_bf16", returns=INT)())
dequantise_rows = function("dequantise_rows", *[POINTER] * 2, *[INT] * 4)


def supports(problem: LinearProblem) -> str | None:
    """fp32, and bf16 by 16 rows and 2 columns; with AMX, up to 512 KiB of it. Quantised weights as they are stored."""
    if problem.dtype not in TYPES:
        return f"not built for {problem.dtype}: kernels/cpu uses the processor's instructions for it"
    if problem.scheme.weight is not None and (reason := in_torch.supports(problem)):
        return reason
    return _refuse_packed(problem) if problem.dtype is torch.bfloat16 else None


def _refuse_packed(problem: LinearProblem) -> str | None:
    rows, columns, target = problem.out_features, problem.in_features, problem.target
    if rows % LANES or columns % 2:
        return f"{rows} rows and {columns} columns are no multiples of {LANES} and 2"
    # Processors beyond x86 have matrix instructions for bf16 too. With a cached weight, oneDNN takes longer to begin
    # than to multiply few tokens.
    has_matrix_instructions = AMX in target.features or target.architecture != "x86_64"
    if has_matrix_instructions and rows * columns * problem.dtype.itemsize > in_torch.CACHED_BYTES:
        return "the packed weights of kernels/cpu use the processor's matrix instructions, which pays for large weights"
    return None


def pack(
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    weight_zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weight, in panels for bf16. A quantised one stays so where that pays and its values allow it."""
    if weight_scale is not None and out_dtype is not None:
        quantised(weight, weight_scale, weight_zero_point)
        if can_stay(weight, weight_scale) and (out_dtype is torch.float32 or _stays_in_bf16(weight, weight_scale)):
            return stored_panels(weight) if out_dtype is torch.bfloat16 else weight.contiguous()
        weight = dequantise(weight, weight_scale, out_dtype, weight_zero_point)
    return panels(weight) if weight.dtype is torch.bfloat16 else weight


def _stays_in_bf16(weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether a weight stays quantised that is multiplied in bf16. Both columns of a pair must share their scale."""
    return MULTIPLIES_BF16 and (weight.dtype is PACKED or scale.shape[1] < weight.shape[1])


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
    if is_stored(weight):
        return _stored(x, weight, bias, weight_scale, weight_zero_point)
    if weight.dtype is torch.bfloat16:
        return _packed(x, weight, bias)
    num_tokens = x.shape[0]  # len(x) takes PyTorch several times as long
    if x.ndim != 2 or x.stride(1) != 1 or not weight.is_contiguous() or num_tokens == 0:
        return F.linear(x, weight, bias).contiguous()
    if num_tokens > FEW_TOKENS:
        return _plain(x, weight, bias)
    if num_tokens == 1 and weight.nbytes <= in_torch.CACHED_BYTES:  # MKL is as fast
        return F.linear(x, weight, bias).contiguous()
    return _called(run, x, weight.data_ptr(), bias, weight.shape[0])


def _stored(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
) -> torch.Tensor:
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    given = described(weight, scale, zero_point)
    if x.dtype is torch.float32 and len(rows) > FEW_TOKENS:
        y = _in_blocks(rows, given, bias, *values_shape(weight))
    else:
        y = _called(run_stored[x.dtype], rows, ctypes.byref(given), bias, len(weight))
    return y if x.ndim == 2 else y.view(*x.shape[:-1], len(weight))


def _in_blocks(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out_features: int, in_features: int
) -> torch.Tensor:
    """The product in fp32 with blocks of rows, each of which is dequantised for this call."""
    y = x.new_empty(len(x), out_features)
    number = max(1, BLOCK_BYTES // (in_features * x.itemsize))
    block = x.new_empty(min(number, out_features), in_features)
    for begin in range(0, out_features, number):
        end = min(begin + number, out_features)
        dequantise_rows(ctypes.byref(weight), block.data_ptr(), begin, end, in_features, out_features)
        y[:, begin:end] = _plain(x, block[: end - begin], None if bias is None else bias[begin:end])
    return y


def _plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of many tokens with a weight in fp32."""
    if ONEDNN[torch.float32] in targets.of("cpu").features:
        return onednn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias).contiguous()


def _packed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    y = _called(run_packed, rows, weight.data_ptr(), bias, weight.shape[0])
    return y if x.ndim == 2 else y.view(*x.shape[:-1], weight.shape[0])


def _called(
    run: Callable, x: torch.Tensor, weight: object, bias: torch.Tensor | None, out_features: int
) -> torch.Tensor:
    """The result of a function of the library for x [num_tokens, in_features] with dense rows.

    weight: its address, or a reference to its description.
    """
    bias = None if bias is None else bias.contiguous()
    num_tokens, in_features = x.shape
    y = torch.empty((num_tokens, out_features), dtype=x.dtype)
    run(
        x.data_ptr(), weight, None if bias is None else bias.data_ptr(), y.data_ptr(), num_tokens, in_features,
        out_features, x.stride(0),
    )  # fmt: skip
    return y
