"""quantise: each program holds whole groups of a row in registers, so that a value is read once and written once.

A dynamic scale for a whole matrix is found by PyTorch first.
"""

import torch
import triton
import triton.language as tl

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _launch, _supports, launched_for
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._rows import EVICT_LAST, MAX_COLUMNS, row_offset, rows, whole_rows
from vllm_opset.ops.quantisation.quantise import QuantiseProblem, check_arguments
from vllm_opset.ops.schemes import FP8, PER_TENSOR, SMALLEST_SCALES, WHOLE, GroupShape, limits, scales_of
from vllm_opset.targets import FP8 as FP8_FEATURE


def supports(problem: QuantiseProblem) -> str | None:
    """fp32, bf16 and fp16 to int8, and to fp8 e4m3 where the target converts to it; scales per tensor, row, or group of
    a row.
    """
    group, target = problem.group, launched_for(problem.target)
    if problem.to_dtype is FP8 and FP8_FEATURE not in target.features:
        return f"{target} does not convert fp8 e4m3"
    if group != PER_TENSOR and group.rows != 1:
        return f"a program holds groups of one row, not of {group}"
    if (problem.columns if group.columns == WHOLE else group.columns) > MAX_COLUMNS:
        return f"groups are held in registers, up to {MAX_COLUMNS} elements"
    return _supports.floats(problem)


@kernel(ops.quantise, name="triton", supports=supports)
def quantise(
    x: torch.Tensor, to_dtype: torch.dtype, group_shape: list[int], scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    check_arguments(x, to_dtype, group_shape, scale)
    group, (num_rows, columns) = GroupShape(*group_shape), x.shape
    one_scale = group == PER_TENSOR
    if one_scale and scale is None:
        scale = scales_of(x, to_dtype, group)
    width = columns if group.columns == WHOLE else group.columns
    groups = _launch.cdiv(columns, width)
    total = num_rows * groups
    out = x.new_empty(x.shape, dtype=to_dtype)
    scales = x.new_empty(group.scale_shape(x.shape), dtype=torch.float32) if scale is None else scale.clone()
    range_ = limits(to_dtype)
    launch = _launch.launch_options(x.device) | whole_rows(width, **_launch.parameters("quantise", x.device, total))
    _quantise[(_launch.cdiv(total, launch["ROWS"]),)](
        x, rows(x), out, scales, total, LEAST=range_.min, LARGEST=range_.max, SMALLEST_SCALE=SMALLEST_SCALES[to_dtype],
        STATIC=scale is not None, ONE_SCALE=one_scale,
        COLUMNS=columns, WIDTH=width, GROUPS=groups, **launch,
    )  # fmt: skip
    return out, scales


@triton.jit(do_not_specialize=["total"])
def _quantise(
    x, x_rows, out, scales, total, LEAST: tl.constexpr, LARGEST: tl.constexpr, SMALLEST_SCALE: tl.constexpr,
    STATIC: tl.constexpr, ONE_SCALE: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    group = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    row, place = group // GROUPS, tl.arange(0, BLOCK)[None, :]
    column = group % GROUPS * WIDTH + place
    mask = (group < total) & (place < WIDTH) & (column < COLUMNS)
    x += row_offset(row, x_rows) + column * x_rows.column_stride
    value = tl.load(x, mask, 0.0, eviction_policy=EVICT_LAST).to(tl.float32)
    if ONE_SCALE:
        scale = tl.load(scales)
    elif STATIC:
        scale = tl.load(scales + group, group < total, 1.0)
    else:
        largest = tl.max(tl.abs(value), 1, keep_dims=True)
        scale = tl.maximum(tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32)), SMALLEST_SCALE)
        tl.store(scales + group, scale, group < total)
    # Rounded to nearest, as PyTorch divides. An approximate quotient could fall on the other side of a tie.
    quotient = tl.div_rn(value, tl.broadcast_to(scale, value.shape))
    quotient = tl.clamp(quotient, LEAST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if out.dtype.element_ty == tl.int8:
        quotient = _rounded(quotient)
    tl.store(out + row.to(tl.int64) * COLUMNS + column, quotient.to(out.dtype.element_ty), mask)


@triton.jit
def _rounded(value):
    """To the nearest integer, ties to even, for magnitudes below 2**22: fp32 has no fractions from 2**23 on."""
    return (value + 1.5 * 2**23) - 1.5 * 2**23
