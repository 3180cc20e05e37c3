"""Quantisation of values that a program holds in registers, for all kernels that store quantised values."""

import functools

import torch
import triton
import triton.language as tl

from vllm_opset.kernels.triton import _launch, _supports, launched_for
from vllm_opset.kernels.triton._rows import row_offset, rows
from vllm_opset.ops.quantisation.quantise import QuantiseProblem
from vllm_opset.ops.schemes import FP8, PER_TENSOR, SMALLEST_SCALES, WHOLE, GroupShape, limits
from vllm_opset.targets import FP8 as FP8_FEATURE


def supports(problem: QuantiseProblem, most_columns: int) -> str | None:
    """fp32, bf16 and fp16 to int8, and to fp8 e4m3 where the target converts to it; scales per tensor, row, or group of
    a row.
    """
    group, target = problem.group, launched_for(problem.target)
    if problem.to_dtype is FP8 and FP8_FEATURE not in target.features:
        return f"{target} does not convert fp8 e4m3"
    if group != PER_TENSOR and group.rows != 1:
        return f"a program holds groups of one row, not of {group}"
    if (problem.columns if group.columns == WHOLE else group.columns) > most_columns:
        return f"groups are held in registers, up to {most_columns} elements"
    return _supports.floats(problem)


@functools.cache
def range_of(to_dtype: torch.dtype) -> dict[str, float]:
    """The constants of a launch that quantises to this dtype."""
    range_ = limits(to_dtype)
    return {"LEAST": range_.min, "LARGEST": range_.max, "SMALLEST_SCALE": SMALLEST_SCALES[to_dtype]}


class Destination:
    """The results of a launch that quantises rows by `store_rows`: [total, columns] of to_dtype, with their scales.

    arguments, constants: what the launch passes on to `store_rows`.
    """

    def __init__(
        self,
        x: torch.Tensor,
        columns: int,
        to_dtype: torch.dtype,
        group_shape: list[int],
        scale: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> None:
        group, shape = GroupShape(*group_shape), (len(x), columns)
        self.width = columns if group.columns == WHOLE else group.columns
        values = x.new_empty(shape, dtype=to_dtype)
        scales = group.new_scales(x, shape)
        self.results = values, scales
        self.arguments = out, None if out is None else rows(out), values, scales, scale
        self.constants = {
            "COLUMNS": columns,
            "GROUPS": scales.shape[1],
            "SCALES_STRIDE": scales.stride(0),
            **range_of(to_dtype),
        }

    def group_width(self, block: int) -> dict[str, int]:
        """The constant WIDTH: the columns of a group, in a program that holds `block` columns of a row."""
        return {"WIDTH": min(block, _launch.next_power_of_2(self.width))}


@triton.jit
def store_rows(
    value, DTYPE: tl.constexpr, row, column, first, total, out, out_rows, values, scales, scale,
    COLUMNS: tl.constexpr, GROUPS: tl.constexpr, SCALES_STRIDE: tl.constexpr, WIDTH: tl.constexpr,
    LEAST: tl.constexpr, LARGEST: tl.constexpr, SMALLEST_SCALE: tl.constexpr,
):  # fmt: skip
    """Stores fp32 values [ROWS, BLOCK] that have been rounded to DTYPE, quantised. Beyond COLUMNS they are zeros.

    first: the first of the columns, a multiple of WIDTH. out: where they are stored unquantised as well, or None.
    """
    ROWS: tl.constexpr = value.shape[0]
    HELD: tl.constexpr = value.shape[1] // WIDTH
    mask = (row < total) & (column < COLUMNS)
    stored = value.to(DTYPE)
    if out is not None:
        tl.store(out + row_offset(row, out_rows) + column * out_rows.column_stride, stored, mask)
    value = stored.to(tl.float32)
    if scale is not None:
        found = tl.load(scale)
        if tl.program_id(0) == 0:
            tl.store(scales, found)
        quotient = rounded(divided(value, found), LEAST, LARGEST, values.dtype.element_ty)
    else:
        groups = tl.reshape(value, [ROWS, HELD, WIDTH])
        found = scale_of(tl.max(tl.abs(groups), 2), LARGEST, SMALLEST_SCALE)
        group = first // WIDTH + tl.arange(0, HELD)[None, :]
        tl.store(scales + row.to(tl.int64) * SCALES_STRIDE + group, found, (row < total) & (group < GROUPS))
        groups = rounded(divided_by_own(groups, found[:, :, None]), LEAST, LARGEST, values.dtype.element_ty)
        quotient = tl.reshape(groups, [ROWS, HELD * WIDTH])
    tl.store(values + row.to(tl.int64) * COLUMNS + column, quotient, mask)


@triton.jit
def scale_of(largest, LARGEST: tl.constexpr, SMALLEST_SCALE: tl.constexpr):
    """The scales of groups with these largest magnitudes."""
    return tl.maximum(tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32)), SMALLEST_SCALE)


@triton.jit
def divided(value, scale):
    """value / scale, rounded to nearest as PyTorch divides. An approximation could fall on the other side of a tie."""
    return tl.div_rn(value, tl.broadcast_to(scale, value.shape))


@triton.jit
def divided_by_own(value, scale):
    """As `divided`, for scales from `scale_of` these groups: three instructions for a value in place of a division.

    The first quotient is a unit in the last place off, or two. What is left of the value then says by how much. Scales
    are normal numbers, and so are their reciprocals. The infinite scale of a group with an infinite value is an
    exception: without it, what is left is the value itself, and finite ones become 0.
    """
    reciprocal = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    finite = tl.where(scale < float("inf"), scale, 0.0)
    reciprocal, finite = tl.broadcast_to(reciprocal, value.shape), tl.broadcast_to(finite, value.shape)
    quotient = value * reciprocal
    return tl.fma(tl.fma(-quotient, finite, value), reciprocal, quotient)


@triton.jit
def rounded(quotient, LEAST: tl.constexpr, LARGEST: tl.constexpr, dtype: tl.constexpr):
    """Limited to the range of dtype and rounded to it."""
    quotient = tl.clamp(quotient, LEAST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if dtype == tl.int8:
        quotient = _to_integer(quotient)
    return quotient.to(dtype)


@triton.jit
def _to_integer(value):
    """To the nearest integer, ties to even, for magnitudes below 2**22: fp32 has no fractions from 2**23 on."""
    return (value + 1.5 * 2**23) - 1.5 * 2**23
