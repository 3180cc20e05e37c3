"""gelu_and_mul_sparse: each program holds whole rows of gates in registers, so that gates are read once."""

import torch
import triton
import triton.language as tl

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._formulas import formula
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._rows import num_rows, row_offset, rows, supports, whole_rows
from vllm_opset.kernels.triton.gelu_and_mul import FORMULAS
from vllm_opset.ops.activation._gated import check_width
from vllm_opset.ops.activation.gelu_and_mul import check_approximation


@kernel(ops.gelu_and_mul_sparse, name="triton", supports=supports)
def gelu_and_mul_sparse(x: torch.Tensor, std_multiplier: float, approximate: str = "none") -> torch.Tensor:
    check_approximation(approximate)
    check_width(x)
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    total, columns = num_rows(x), out.shape[-1]
    launch = whole_rows(columns, **_launch.parameters("gelu_and_mul_sparse", x.device, total))
    _launch.launch(
        _gelu_and_mul_sparse, (_launch.cdiv(total, launch["ROWS"]),),
        x, rows(x), out, total, std_multiplier, FORMULA=FORMULAS[approximate], COLUMNS=columns, **launch,
        **_launch.launch_options(x.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["total"])
def _gelu_and_mul_sparse(
    x, x_rows, out, total, std_multiplier,
    FORMULA: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < COLUMNS
    mask = (row < total) & inside
    start = x + row_offset(row, x_rows)
    gate = tl.load(start + column * x_rows.column_stride, mask, 0.0).to(tl.float32)
    up = tl.load(start + (COLUMNS + column) * x_rows.column_stride, mask, 0.0).to(tl.float32)
    mean = tl.sum(gate, 1, keep_dims=True) / COLUMNS
    centred = tl.where(inside, gate - mean, 0.0)
    std = tl.sqrt(tl.sum(centred * centred, 1, keep_dims=True) / COLUMNS)
    kept = tl.maximum(gate - (mean + std_multiplier * std), 0.0)
    tl.store(out + row.to(tl.int64) * COLUMNS + column, formula(FORMULA, (kept, up), ()), mask)
