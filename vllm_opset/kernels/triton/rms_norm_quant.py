"""rms_norm_quant: each program holds whole rows in registers, from which it finds the norm and then the scales."""

import torch
import triton
import triton.language as tl

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _launch, _quantised
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._quantised import Destination, store_rows
from vllm_opset.kernels.triton._rows import EVICT_LAST, MAX_COLUMNS, load_parameter, row_offset, rows, whole_rows
from vllm_opset.ops.norm.rms_norm_quant import RMSNormQuantProblem, check_arguments


def supports(problem: RMSNormQuantProblem) -> str | None:
    """As `quantise`, with rows of up to 65,536 elements."""
    if problem.columns > MAX_COLUMNS:
        return f"rows are held in registers, up to {MAX_COLUMNS} elements"
    return _quantised.supports(problem, MAX_COLUMNS)


@kernel(ops.rms_norm_quant, name="triton", supports=supports)
def rms_norm_quant(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    to_dtype: torch.dtype,
    group_shape: list[int],
    scale: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_arguments(x, weight, to_dtype, group_shape, scale, out)
    return normalise("rms_norm_quant", x, None, weight, epsilon, weight_offset, to_dtype, group_shape, scale, out)


def normalise(
    launch: str, x, residual, weight, epsilon, weight_offset, to_dtype, group_shape, scale, out
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op, for arguments that were checked, after adding x to the residual unless it is None."""
    total, columns = x.shape
    to = Destination(x, columns, to_dtype, group_shape, scale, out)
    early = "groups_norm_quant_early_launch" if to.width < columns else "norm_quant_early_launch"
    options = whole_rows(columns, **_launch.parameters(launch, x.device, total))
    _launch.launch(
        _rms_norm_quant, (max(1, _launch.cdiv(total, options["ROWS"])),),
        x, rows(x), residual, None if residual is None else rows(residual), weight, total, epsilon, weight_offset,
        *to.arguments, **to.constants, **to.group_width(options["BLOCK"]), **options,
        **_launch.early_launch_options(x.device, total, early),
    )  # fmt: skip
    return to.results


@triton.jit(do_not_specialize=["total"])
def _rms_norm_quant(
    x, x_rows, residual, residual_rows, weight, total, epsilon, weight_offset, out, out_rows, values, scales, scale,
    COLUMNS: tl.constexpr, GROUPS: tl.constexpr, SCALES_STRIDE: tl.constexpr, WIDTH: tl.constexpr,
    LEAST: tl.constexpr, LARGEST: tl.constexpr, SMALLEST_SCALE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < total) & (column < COLUMNS)
    place = x + row_offset(row, x_rows) + column * x_rows.column_stride
    value = tl.load(place, mask, 0.0, eviction_policy=EVICT_LAST).to(tl.float32)
    if residual is not None:
        residual += row_offset(row, residual_rows) + column * residual_rows.column_stride
        value += tl.load(residual, mask, 0.0, eviction_policy=EVICT_LAST).to(tl.float32)
        tl.store(residual, value, mask)
    factor = load_parameter(weight, column, COLUMNS)  # this load overlaps the sum of the row
    value *= tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) / COLUMNS + epsilon)
    if weight is not None:
        value *= factor + weight_offset
    store_rows(
        value, x.dtype.element_ty, row, column, 0, total, out, out_rows, values, scales, scale,
        COLUMNS, GROUPS, SCALES_STRIDE, WIDTH, LEAST, LARGEST, SMALLEST_SCALE,
    )  # fmt: skip
