"""One launch for all activations: it applies a formula elementwise over rows, in fp32 and rounded once.

A formula takes an element (for a gated activation: gate and up), and the op's own parameters as floats. It is selected
by its name in `_formulas`.
"""

import torch
import triton
import triton.language as tl

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._formulas import formula
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._rows import enough_warps, num_rows, row_offset, rows
from vllm_opset.ops.activation._gated import check_width


def unary(name: str, x: torch.Tensor, *parameters: float) -> torch.Tensor:
    """Applies the formula to each element. Returns a new contiguous tensor of x's shape."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows_of_one = x if x.dim() else x.unsqueeze(0)
    _launch_over("unary", _unary, rows_of_one, out, rows_of_one.shape[-1], parameters, FORMULA=name)
    return out


def gated(name: str, x: torch.Tensor, *parameters: float, interleaved: bool = False) -> torch.Tensor:
    """Applies the formula to gate and up, which are the halves of x's rows, or alternate if interleaved.

    Returns a new contiguous tensor [..., d] for an x of [..., 2 * d].
    """
    check_width(x)
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    _launch_over("gated", _gated, x, out, out.shape[-1], parameters, FORMULA=name, INTERLEAVED=interleaved)
    return out


def _launch_over(
    launch: str, elementwise, x: torch.Tensor, out: torch.Tensor, columns: int, parameters, **constants
) -> None:
    total = num_rows(x)
    values = _launch.parameters(launch, x.device, total)
    block = min(values["tile"], _launch.next_power_of_2(columns))
    held = values["tile"] // block
    _launch.launch(
        elementwise, (_launch.cdiv(total, held) * _launch.cdiv(columns, block),),
        x, rows(x), out, total, parameters,
        COLUMNS=columns, ROWS=held, BLOCK=block, num_warps=enough_warps(values["warps"], values["tile"]),
        **constants, **_launch.early_launch_options(x.device, total),
    )  # fmt: skip


@triton.jit
def tile(total, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The rows and columns of this program, and a mask of those that exist. Adjacent programs take adjacent columns."""
    blocks_a_row: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // blocks_a_row * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % blocks_a_row * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, column, (row < total) & (column < COLUMNS)


@triton.jit(do_not_specialize=["total"])
def _unary(
    x, x_rows, out, total, parameters,
    FORMULA: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row, column, mask = tile(total, COLUMNS, ROWS, BLOCK)
    value = tl.load(x + row_offset(row, x_rows) + column * x_rows.column_stride, mask).to(tl.float32)
    tl.store(out + row.to(tl.int64) * COLUMNS + column, formula(FORMULA, (value,), parameters), mask)


@triton.jit(do_not_specialize=["total"])
def _gated(
    x, x_rows, out, total, parameters,
    FORMULA: tl.constexpr, INTERLEAVED: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row, column, mask = tile(total, COLUMNS, ROWS, BLOCK)
    start = x + row_offset(row, x_rows)
    if INTERLEAVED:
        first = 2 * (tl.program_id(0) % tl.cdiv(COLUMNS, BLOCK)) * BLOCK
        element = first + tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.load(start + element * x_rows.column_stride, (row < total) & (element < 2 * COLUMNS))
        gate, up = tl.split(tl.reshape(both, [ROWS, BLOCK, 2]))
    else:
        gate = tl.load(start + column * x_rows.column_stride, mask)
        up = tl.load(start + (COLUMNS + column) * x_rows.column_stride, mask)
    result = formula(FORMULA, (gate.to(tl.float32), up.to(tl.float32)), parameters)
    tl.store(out + row.to(tl.int64) * COLUMNS + column, result, mask)
