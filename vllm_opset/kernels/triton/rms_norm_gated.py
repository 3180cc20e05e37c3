"""rms_norm_gated: each program holds whole groups of x and z in registers, so that both are read once."""

import torch
import triton
import triton.language as tl

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _launch, _supports
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._rows import MAX_COLUMNS, num_rows, row_offset, rows, whole_rows
from vllm_opset.ops.norm.rms_norm_gated import SILU, RMSNormGatedProblem, check_arguments


def supports(problem: RMSNormGatedProblem) -> str | None:
    """fp32, bf16 and fp16, accumulated in fp32; groups of up to 65,536 elements."""
    if problem.group_size > MAX_COLUMNS:
        return f"groups are held in registers, up to {MAX_COLUMNS} elements"
    return _supports.floats(problem)


@kernel(ops.rms_norm_gated, name="triton", supports=supports)
def rms_norm_gated(
    x: torch.Tensor,
    z: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: str = "swish",
) -> torch.Tensor:
    groups = check_arguments(x, z, weight, group_size, activation)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    x, z = _grouped(x, groups), None if z is None else _grouped(z, groups)
    total, columns = num_rows(x), x.shape[-1]
    launch = whole_rows(columns, **_launch.parameters("rms_norm_gated", x.device, total))
    _launch.launch(
        _rms_norm_gated, (_launch.cdiv(total, launch["ROWS"]),),
        x, rows(x), z, None if z is None else rows(z), weight, groups, out, total, epsilon,
        NORM_BEFORE_GATE=norm_before_gate, SILU=activation in SILU, COLUMNS=columns, **launch,
        **_launch.launch_options(x.device),
    )  # fmt: skip
    return out


def _grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    """[rows, groups, elements of a group], a view unless the leading dimensions have no common stride."""
    return x.reshape(-1, x.shape[-1]).unflatten(-1, (groups, -1))


@triton.jit(do_not_specialize=["total"])
def _rms_norm_gated(
    x, x_rows, z, z_rows, weight, groups, out, total, epsilon,
    NORM_BEFORE_GATE: tl.constexpr, SILU: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < total) & (column < COLUMNS)
    value = tl.load(x + row_offset(row, x_rows) + column * x_rows.column_stride, mask, 0.0).to(tl.float32)
    scale = tl.load(weight + row % groups * COLUMNS + column, mask, 0.0).to(tl.float32)
    if z is not None:
        gate = tl.load(z + row_offset(row, z_rows) + column * z_rows.column_stride, mask, 0.0).to(tl.float32)
        gate = gate * tl.sigmoid(gate) if SILU else tl.sigmoid(gate)
        if NORM_BEFORE_GATE:
            scale *= gate
        else:
            value *= gate
    value *= tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) / COLUMNS + epsilon)
    tl.store(out + row.to(tl.int64) * COLUMNS + column, value * scale, mask)
