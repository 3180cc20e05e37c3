"""Any tensor as rows: code that all kernels on the last dimension share.

The leading dimensions are collapsed to at most two. So a kernel handles `[T, H]`, `[T, heads, D]` and views of wider
tensors in the same way, without a copy.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_opset import targets
from vllm_opset.kernels.triton import _supports
from vllm_opset.kernels.triton._launch import next_power_of_2
from vllm_opset.ops.contract import Problem

MAX_THREADS = 1024  # threads of a thread block, on every GPU
MAX_PER_THREAD = 64  # elements that a thread holds in registers
MAX_COLUMNS = 65536  # columns of a row that a thread block holds in registers
# The eviction policy for rows: they stay longest in the last-level cache. This saves 3 to 4 % of the time of large
# calls.
EVICT_LAST = tl.constexpr("evict_last")


class Rows(NamedTuple):
    """The layout of a tensor's rows: row i starts at (i // inner) * outer_stride + (i % inner) * inner_stride."""

    inner: int
    outer_stride: int
    inner_stride: int
    column_stride: int


def rows(x: torch.Tensor) -> Rows:
    """The rows of `x` along its last dimension.

    Raises ValueError if its leading dimensions cannot be collapsed to two.
    """
    if x.dim() == 2:
        return Rows(1, x.stride(0), 0, x.stride(1))
    runs: list[tuple[int, int]] = []  # (number of rows, stride), outermost first
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        elif size != 1 or not runs:  # a single token counts as a run, so that it needs no separate variant
            runs.append((size, stride))
    if len(runs) > 2 and runs[0][0] == 1:
        del runs[0]
    if len(runs) > 2:
        raise ValueError(f"strides {x.stride()} of shape {tuple(x.shape)} are not two runs of rows: call .contiguous()")
    outer_stride = runs[0][1] if runs else 0
    inner, inner_stride = runs[1] if len(runs) == 2 else (1, 0)
    return Rows(inner, outer_stride, inner_stride, x.stride(-1))


def supports(problem: Problem) -> str | None:
    """fp32, bf16 and fp16, accumulated in fp32; rows of up to 65,536 elements."""
    if problem.hidden_size > MAX_COLUMNS:
        return f"rows are held in registers, up to {MAX_COLUMNS} elements"
    return _supports.floats(problem)


def num_rows(x: torch.Tensor) -> int:
    """The number of rows of `x` along its last dimension."""
    return x.numel() // x.shape[-1] if x.shape[-1] else 0


def enough_warps(warps: int, elements: int) -> int:
    """A number of warps, at least `warps` and a power of two, whose registers hold the elements of a program."""
    warp_size = targets.of("cuda").warp_size
    return min(MAX_THREADS // warp_size, max(warps, next_power_of_2(elements) // (warp_size * MAX_PER_THREAD)))


def whole_rows(columns: int, tile: int, warps: int) -> dict[str, int]:
    """Launch arguments of a kernel whose programs hold whole rows, as many as fit `tile` elements."""
    block = next_power_of_2(columns)
    held = max(1, tile // block)
    return {"ROWS": held, "BLOCK": block, "num_warps": enough_warps(warps, held * block)}


@triton.jit
def row_offset(row, rows):
    """The 64-bit offsets at which rows start. `row` is a block of row numbers, `rows` a `Rows`."""
    outer = (row // rows.inner).to(tl.int64) * rows.outer_stride
    return outer + (row % rows.inner).to(tl.int64) * rows.inner_stride


@triton.jit
def load_parameter(parameter, column, COLUMNS: tl.constexpr):
    """A weight or bias for the columns of a row, in fp32. If it is None, returns zeros, which nothing uses."""
    if parameter is None:
        values = tl.zeros_like(column).to(tl.float32)
    else:
        values = tl.load(parameter + column, column < COLUMNS, 0.0).to(tl.float32)
    return values
