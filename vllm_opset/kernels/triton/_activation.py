"""One launch for all activations: elementwise over rows, a formula in fp32, rounded once.

A formula is a Triton function of the row's value (or of gate and up, for a gated activation) and of the op's own
parameters, which reach it as floats.
"""

import torch
import triton
import triton.language as tl

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._rows import num_rows, row_offset, rows, warps


def supports(problem) -> str | None:
    """Everything in the contract."""
    return None


def unary(formula, x: torch.Tensor, *parameters: float) -> torch.Tensor:
    """formula(x, *parameters) of each element. Returns a new contiguous tensor of x's shape."""
    return _run(_unary, formula, x, x.shape[-1], parameters)


def gated(formula, x: torch.Tensor, *parameters: float) -> torch.Tensor:
    """formula(gate, up, *parameters) of the two halves of the last dimension. Returns a new contiguous [..., d]."""
    return _run(_gated, formula, x, x.shape[-1] // 2, parameters)


def _run(elementwise, formula, x: torch.Tensor, columns: int, parameters: tuple[float, ...]) -> torch.Tensor:
    out = torch.empty((*x.shape[:-1], columns), dtype=x.dtype, device=x.device)
    total = num_rows(x)
    values = _launch.parameters("activation", x.device, total)
    block = min(values["tile"], triton.next_power_of_2(columns))
    held = values["tile"] // block
    elementwise[(triton.cdiv(total, held) * triton.cdiv(columns, block),)](
        x, rows(x), out, total, parameters,
        FORMULA=formula, COLUMNS=columns, ROWS=held, BLOCK=block,
        num_warps=warps(values["tile"], values["per_thread"]),
    )  # fmt: skip
    return out


@triton.jit
def _tile(total, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """This program's rows and columns, and which of them there are. Neighbours in a row go to neighbouring programs."""
    blocks_a_row: tl.constexpr = tl.cdiv(COLUMNS, BLOCK)
    row = tl.program_id(0) // blocks_a_row * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % blocks_a_row * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, column, (row < total) & (column < COLUMNS)


@triton.jit(do_not_specialize=["total"])
def _unary(
    x, x_rows, out, total, parameters,
    FORMULA: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column, mask = _tile(total, COLUMNS, ROWS, BLOCK)
    value = tl.load(x + row_offset(row, x_rows) + column * x_rows.column_stride, mask, 0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * COLUMNS + column, FORMULA(value, *parameters), mask)


@triton.jit(do_not_specialize=["total"])
def _gated(
    x, x_rows, out, total, parameters,
    FORMULA: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column, mask = _tile(total, COLUMNS, ROWS, BLOCK)
    start = x + row_offset(row, x_rows)
    gate = tl.load(start + column * x_rows.column_stride, mask, 0.0).to(tl.float32)
    up = tl.load(start + (COLUMNS + column) * x_rows.column_stride, mask, 0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * COLUMNS + column, FORMULA(gate, up, *parameters), mask)
