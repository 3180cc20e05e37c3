"""fused_add_rms_norm: each program holds whole rows of the sum in registers. A row costs two reads and two writes."""

import torch
import triton
import triton.language as tl

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._rows import EVICT_LAST, load_parameter, num_rows, row_offset, rows, supports, whole_rows
from vllm_opset.ops.norm.fused_add_rms_norm import check_arguments


@kernel(ops.fused_add_rms_norm, name="triton", supports=supports)
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    weight_offset: float = 0.0,
) -> None:
    check_arguments(x, residual, weight)
    total, columns = num_rows(x), x.shape[-1]
    launch = _launch.early_launch_options(x.device, total) | whole_rows(
        columns, **_launch.parameters("fused_add_rms_norm", x.device, total)
    )
    _launch.launch(
        _fused_add_rms_norm, (_launch.cdiv(total, launch["ROWS"]),),
        x, rows(x), residual, rows(residual), weight, total, epsilon, weight_offset, COLUMNS=columns, **launch,
    )  # fmt: skip


@triton.jit(do_not_specialize=["total"])
def _fused_add_rms_norm(
    x, x_rows, residual, residual_rows, weight, total, epsilon, weight_offset,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < total) & (column < COLUMNS)
    x += row_offset(row, x_rows) + column * x_rows.column_stride
    residual += row_offset(row, residual_rows) + column * residual_rows.column_stride
    value = tl.load(x, mask, 0.0, eviction_policy=EVICT_LAST).to(tl.float32)
    value += tl.load(residual, mask, 0.0, eviction_policy=EVICT_LAST).to(tl.float32)
    scale = load_parameter(weight, column, COLUMNS)  # this load overlaps the sum of the row
    tl.store(residual, value, mask)
    value *= tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) / COLUMNS + epsilon)
    if weight is not None:
        value *= scale + weight_offset
    tl.store(x, value, mask)
