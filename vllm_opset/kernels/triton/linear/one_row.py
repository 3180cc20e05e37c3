"""linear for one row of x: programs sum products in registers, as fast as they can read the weight."""

import torch
import triton
import triton.language as tl

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._launch import pdl_wait


def one_row_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of the contract by the variant `one_row`, for arguments that were checked."""
    num_outputs, columns = weight.shape
    out = x.new_empty((*x.shape[:-1], num_outputs))
    launch = _launch.launch_options(x.device) | _parts(columns, **_launch.parameters("linear", x.device, columns))
    _launch.launch(
        _linear, (_launch.cdiv(num_outputs, launch["OUTPUTS"]),),
        x, x.stride(-1), weight, weight.stride(0), bias, out, num_outputs, COLUMNS=columns, **launch,
    )  # fmt: skip
    return out


def _parts(columns: int, tile: int, width: int, warps: int) -> dict[str, int]:
    """Launch arguments of a program that holds `tile` elements of the weight at a time, up to `width` of each row."""
    block = min(width, _launch.next_power_of_2(columns))
    return {"OUTPUTS": tile // block, "BLOCK": block, "num_warps": warps}


@triton.jit(do_not_specialize=["num_outputs"])
def _linear(
    x, x_stride, weight, weight_stride, bias, out, num_outputs,
    COLUMNS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, BLOCK)
    is_output = output < num_outputs
    # Past the last row, a program reads that row again. With a mask instead, it adds products before its last loads if
    # Triton 3.8 compiles it. It then waits for memory twice, and takes up to 1.25 times as long.
    row = tl.minimum(output, num_outputs - 1)
    weight += row.to(tl.int64)[:, None] * weight_stride + column[None, :]
    products = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    for first in tl.range(0, COLUMNS, BLOCK):
        inside = first + column < COLUMNS
        # The weight is read only once, so it must not displace other data in the last-level cache. All programs read
        # the row x, so it stays there.
        w = tl.load(weight + first, inside[None, :], 0.0, eviction_policy="evict_first")
        v = tl.load(x + (first + column) * x_stride, inside, 0.0, eviction_policy="evict_last")
        products += w.to(tl.float32) * v.to(tl.float32)[None, :]
    y = tl.sum(products, 1)
    if bias is not None:
        y += tl.load(bias + output, is_output, 0.0).to(tl.float32)
    tl.store(out + output, y, is_output)
