"""silu_and_mul_quant: a program holds whole groups, so that gate and up are read once.

With scales of rows, it holds whole rows. Otherwise it holds a part of a row with whole groups.
"""

import functools

import torch
import triton
import triton.language as tl

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _formulas, _launch, _quantised
from vllm_opset.kernels.triton._activation import tile
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._quantised import Destination, store_rows
from vllm_opset.kernels.triton._rows import MAX_COLUMNS, enough_warps, row_offset, rows
from vllm_opset.ops.activation.silu_and_mul_quant import check_arguments
from vllm_opset.ops.quantisation.quantise import QuantiseProblem

LEAST_COLUMNS = 128  # of a row that a program holds, if its groups do not say how many


def supports(problem: QuantiseProblem) -> str | None:
    """As `quantise`, with groups of up to 32,768 elements, since registers hold gate and up."""
    return _quantised.supports(problem, MAX_COLUMNS // 2)


@kernel(ops.silu_and_mul_quant, name="triton", supports=supports)
def silu_and_mul_quant(
    x: torch.Tensor,
    to_dtype: torch.dtype,
    group_shape: list[int],
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_arguments(x, to_dtype, group_shape, scale, out)
    total, columns = len(x), x.shape[1] // 2
    to = Destination(x, columns, to_dtype, group_shape, scale, out)
    of_groups = to.width < columns or scale is not None
    values = _launch.parameters("silu_and_mul_quant_groups" if of_groups else "silu_and_mul_quant", x.device, total)
    least = LEAST_COLUMNS if scale is not None else _launch.next_power_of_2(to.width)
    block = _part(columns, least, max(least, values["tile"]))
    held, warps = max(1, values["tile"] // block), values["warps"] * max(1, block // values["tile"])
    _launch.launch(
        _silu_and_mul_quant, (max(1, _launch.cdiv(total, held)) * _launch.cdiv(columns, block),),
        x, rows(x), total, *to.arguments, **to.constants, **to.group_width(block),
        ROWS=held, BLOCK=block, num_warps=enough_warps(warps, 2 * held * block),
        **_launch.early_launch_options(x.device, total, "quantised_early_launch"),
    )  # fmt: skip
    return to.results


@functools.cache
def _part(columns: int, least: int, most: int) -> int:
    """The columns of a row that a program holds: the largest power of two that leaves the fewest of all lanes idle."""
    sizes = (1 << bits for bits in range(least.bit_length() - 1, most.bit_length()))
    return min(sizes, key=lambda size: (_launch.cdiv(columns, size) * size, -size))


@triton.jit(do_not_specialize=["total"])
def _silu_and_mul_quant(
    x, x_rows, total, out, out_rows, values, scales, scale,
    COLUMNS: tl.constexpr, GROUPS: tl.constexpr, SCALES_STRIDE: tl.constexpr, WIDTH: tl.constexpr,
    LEAST: tl.constexpr, LARGEST: tl.constexpr, SMALLEST_SCALE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row, column, mask = tile(total, COLUMNS, ROWS, BLOCK)
    start = x + row_offset(row, x_rows)
    gate = tl.load(start + column * x_rows.column_stride, mask, 0.0).to(tl.float32)
    up = tl.load(start + (COLUMNS + column) * x_rows.column_stride, mask, 0.0).to(tl.float32)
    first = tl.program_id(0) % tl.cdiv(COLUMNS, BLOCK) * BLOCK
    store_rows(
        _formulas.silu_and_mul(gate, up), x.dtype.element_ty, row, column, first, total,
        out, out_rows, values, scales, scale, COLUMNS, GROUPS, SCALES_STRIDE, WIDTH, LEAST, LARGEST, SMALLEST_SCALE,
    )  # fmt: skip
