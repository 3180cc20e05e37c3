"""linear with fp8 or int8 weights: a matrix product by tiles, which multiplies the sum of each tile by its scales.

`_products.scaled` says how stored values are multiplied. For results in fp32, both factors are widened first.
"""

import torch
import triton
import triton.language as tl

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._products.scaled import bits, product_of, scale_group
from vllm_opset.targets import FP8 as FP8_FEATURE

# The sizes of a program's tile. They were not tuned: a GPU has checked this kernel, and not timed it.
TOKENS = (16, 64)  # the least that tensor cores take, and the most
OUTPUTS, COLUMNS = 64, 64
WARPS, STAGES = 4, 3


def scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The product of the contract, for arguments that were checked."""
    (outputs, columns), rows = weight.shape, x.reshape(-1, x.shape[-1])
    out = x.new_empty((*x.shape[:-1], outputs), dtype=out_dtype)
    weight_group, w_strides = scale_group(weight, weight_scale)
    x_group, x_strides = ((1, columns), (0, 0)) if x_scale is None else scale_group(x, x_scale)
    # Tensor cores add products of fp8 with some 14 bits, which are too few for results in fp32.
    native = x_scale is not None and FP8_FEATURE in _launch.target(x.device).features and out_dtype.itemsize == 2
    # A tile has one scale along the columns: whole groups are as long as a row, which the last tile may exceed.
    widths = [group[1] for group in (weight_group, x_group) if group[1] < columns]
    tokens = min(max(_launch.next_power_of_2(len(rows)), TOKENS[0]), TOKENS[1])
    grid = (_launch.cdiv(len(rows), tokens), _launch.cdiv(outputs, OUTPUTS))
    _launch.launch(
        _scaled_linear, grid,
        *map(bits, (rows, weight)), bias, out, weight_scale, x_scale, len(rows), outputs,
        rows.stride(0), rows.stride(1), weight.stride(0), *w_strides, *x_strides,
        COLUMNS=columns, W_ROWS=weight_group[0], W_COLUMNS=weight_group[1], X_COLUMNS=x_group[1], NATIVE=native,
        BLOCK_T=tokens, BLOCK_N=OUTPUTS, BLOCK_K=min([COLUMNS, *widths]), num_warps=WARPS, num_stages=STAGES,
        **_launch.FUSION,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens", "num_outputs"])
def _scaled_linear(
    x, weight, bias, out, weight_scale, x_scale, num_tokens, num_outputs,
    x_stride, x_column_stride, weight_stride, ws_row, ws_column, xs_row, xs_column,
    COLUMNS: tl.constexpr, W_ROWS: tl.constexpr, W_COLUMNS: tl.constexpr, X_COLUMNS: tl.constexpr,
    NATIVE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = tl.arange(0, BLOCK_K)
    is_token, is_output = token < num_tokens, output < num_outputs
    x += token.to(tl.int64)[:, None] * x_stride
    weight += output.to(tl.int64)[None, :] * weight_stride
    sums = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for first in tl.range(0, COLUMNS, BLOCK_K):
        column = first + place
        inside = column < COLUMNS
        a = tl.load(x + column[None, :] * x_column_stride, is_token[:, None] & inside[None, :], 0)
        b = tl.load(weight + column[:, None], inside[:, None] & is_output[None, :], 0)
        product = product_of(a, b, x_scale is not None, NATIVE)
        scales = weight_scale + output // W_ROWS * ws_row + first // W_COLUMNS * ws_column
        product *= tl.load(scales, is_output, 0.0)[None, :]
        if x_scale is not None:
            product *= tl.load(x_scale + token * xs_row + first // X_COLUMNS * xs_column, is_token, 0.0)[:, None]
        sums += product
    if bias is not None:
        sums += tl.load(bias + output, is_output, 0.0).to(tl.float32)[None, :]
    out += token.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(out, sums, is_token[:, None] & is_output[None, :])
