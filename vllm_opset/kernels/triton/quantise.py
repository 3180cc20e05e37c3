"""quantise: each program holds whole groups of a row in registers, so that a value is read once and written once.

A dynamic scale for a whole matrix is found by PyTorch first.
"""

import torch
import triton
import triton.language as tl

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _launch, _quantised
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._quantised import divided, divided_by_own, range_of, rounded, scale_of
from vllm_opset.kernels.triton._rows import EVICT_LAST, MAX_COLUMNS, row_offset, rows, whole_rows
from vllm_opset.ops.quantisation.quantise import QuantiseProblem, as_result, check_arguments
from vllm_opset.ops.schemes import PER_TENSOR, WHOLE, GroupShape, scales_of


def supports(problem: QuantiseProblem) -> str | None:
    """fp32, bf16 and fp16 to int8, and to fp8 e4m3 where the target converts to it; scales per tensor, row, or group of
    a row.
    """
    return _quantised.supports(problem, MAX_COLUMNS)


@kernel(ops.quantise, name="triton", supports=supports)
def quantise(
    x: torch.Tensor, to_dtype: torch.dtype, group_shape: list[int], scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    check_arguments(x.shape, to_dtype, group_shape, scale)
    group, (num_rows, columns) = GroupShape(*group_shape), x.shape
    one_scale = group == PER_TENSOR
    if one_scale and scale is None:
        scale = scales_of(x, to_dtype, group)
    width = columns if group.columns == WHOLE else group.columns
    groups = _launch.cdiv(columns, width)
    total = num_rows * groups
    out = x.new_empty(x.shape, dtype=to_dtype)
    scales = group.new_scales(x, x.shape) if scale is None else as_result(scale, x.shape, group)
    launch = _launch.early_launch_options(x.device, num_rows, "quantise_early_launch") | whole_rows(
        width, **_launch.parameters("quantise", x.device, total)
    )
    _launch.launch(
        _quantise, (_launch.cdiv(total, launch["ROWS"]),), x, rows(x), out, scales, total, **range_of(to_dtype),
        STATIC=scale is not None, ONE_SCALE=one_scale,
        COLUMNS=columns, WIDTH=width, GROUPS=groups, SCALES_STRIDE=scales.stride(0), **launch,
    )  # fmt: skip
    return out, scales


@triton.jit(do_not_specialize=["total"])
def _quantise(
    x, x_rows, out, scales, total, LEAST: tl.constexpr, LARGEST: tl.constexpr, SMALLEST_SCALE: tl.constexpr,
    STATIC: tl.constexpr, ONE_SCALE: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, SCALES_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    group = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    row, place = group // GROUPS, tl.arange(0, BLOCK)[None, :]
    column = group % GROUPS * WIDTH + place
    mask = (group < total) & (place < WIDTH) & (column < COLUMNS)
    x += row_offset(row, x_rows) + column * x_rows.column_stride
    if not ONE_SCALE:
        scales += row.to(tl.int64) * SCALES_STRIDE + group % GROUPS
    value = tl.load(x, mask, 0.0, eviction_policy=EVICT_LAST).to(tl.float32)
    if ONE_SCALE:
        quotient = divided(value, tl.load(scales))
    elif STATIC:
        quotient = divided(value, tl.load(scales, group < total, 1.0))
    else:
        largest = tl.max(tl.abs(value), 1, keep_dims=True)
        scale = scale_of(largest, LARGEST, SMALLEST_SCALE)
        tl.store(scales, scale, group < total)
        quotient = divided_by_own(value, scale)
    quotient = rounded(quotient, LEAST, LARGEST, out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * COLUMNS + column, quotient, mask)
