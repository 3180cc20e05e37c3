"""linear with weights of 4 bits: tiles of the packed weight for few tokens, the dequantised weight for many.

- `packed`: a program dequantises a tile of the weight in registers and multiplies it on tensor cores. What it reads
  from memory are the packed bytes. Few outputs do not fill a GPU. Then several programs share a row of the weight, and
  a second kernel adds their sums. The order of the sums is always the same.
- `dequantised`: one kernel writes the weight in the dtype of x, and PyTorch (cuBLAS) multiplies. For many tokens the
  time of the first is small beside that of the product.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._products.int4 import HALF, NO_ZERO_POINT, dequantised_tile, paired, scale_columns
from vllm_opset.ops.schemes import values_shape

LEAST_TOKENS = 16  # that tensor cores take
# The elements of a program of `_sum_splits`, and of one of `_dequantise`: both only move data.
SUMS, DEQUANTISED_BYTES = 1024, 2048


def most_packed_tokens(device: torch.device) -> int:
    """The number of tokens up to which the packed weight is multiplied."""
    return _launch.parameters("linear_dequantised", device, 0)["most_packed_tokens"]


def packed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None,
) -> torch.Tensor:
    """The product of the contract by the variant `packed`, for arguments that were checked."""
    (outputs, columns), rows = values_shape(weight), x.reshape(-1, x.shape[-1])
    values = _launch.parameters("linear_packed", x.device, len(rows))
    tokens = min(max(_launch.next_power_of_2(len(rows)), LEAST_TOKENS), values["tokens"])
    group = scale_columns(weight, weight_scale)
    width = min(values["width"], group if group < columns else columns & -columns)
    tiles = _launch.cdiv(len(rows), tokens) * _launch.cdiv(outputs, values["outputs"])
    split_tiles, splits = splits_of(_launch.cdiv(columns, width), values["programs"] // max(tiles, 1))
    out = x.new_empty((*x.shape[:-1], outputs))
    sums = out if splits == 1 else x.new_empty((splits, len(rows), outputs), dtype=torch.float32)
    options = _launch.launch_options(x.device)
    grid = (_launch.cdiv(outputs, values["outputs"]), _launch.cdiv(len(rows), tokens), splits)
    _launch.launch(
        _multiply_packed, grid,
        rows, weight, weight_scale, weight_zero_point, bias if splits == 1 else None, sums, len(rows), outputs,
        split_tiles, rows.stride(0), rows.stride(1), weight_scale.stride(0), weight_scale.stride(1),
        COLUMNS=columns, GROUP=group, BLOCK_T=tokens, BLOCK_N=values["outputs"],
        BYTES=width // 2, PAIRED=paired(x), num_warps=values["warps"], num_stages=values["stages"], **options,
    )  # fmt: skip
    if splits > 1:
        _launch.launch(
            _sum_splits, (_launch.cdiv(out.numel(), SUMS),),
            sums, bias, out, splits, out.numel(), outputs, BLOCK=SUMS, **options,
        )  # fmt: skip
    return out


def dequantised_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None,
) -> torch.Tensor:
    """The product of the contract by the variant `dequantised`, for arguments that were checked."""
    return F.linear(x, dequantise(weight, weight_scale, weight_zero_point, x.dtype), bias).contiguous()


def dequantise(
    weight: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The matrix that a packed weight stands for, rounded once."""
    outputs, columns = values_shape(weight)
    out = weight.new_empty((outputs, columns), dtype=dtype)
    block = min(_launch.next_power_of_2(columns // 2), DEQUANTISED_BYTES)
    grid = (outputs, _launch.cdiv(columns // 2, block))
    _launch.launch(
        _dequantise, grid,
        weight, scale, zero_point, out, scale.stride(0), scale.stride(1),
        COLUMNS=columns, GROUP=scale_columns(weight, scale), BLOCK=block, **_launch.launch_options(weight.device),
    )  # fmt: skip
    return out


def splits_of(tiles: int, most: int) -> tuple[int, int]:
    """The tiles of a row of the weight for one program, and into how many such parts a row is split."""
    of_split = _launch.cdiv(tiles, max(most, 1))
    return of_split, _launch.cdiv(tiles, of_split)


@triton.jit(do_not_specialize=["num_tokens", "num_outputs", "split_tiles"])
def _multiply_packed(
    x, weight, scale, zero_point, bias, out, num_tokens, num_outputs, split_tiles,
    x_stride, x_column_stride, scale_stride, scale_column_stride,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BYTES: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    place = tl.arange(0, BYTES)
    column = place // HALF * (2 * HALF) + place % HALF  # of the low four bits; the high ones are HALF further
    is_token, is_output = token < num_tokens, output < num_outputs
    x += token.to(tl.int64)[None, :] * x_stride
    weight += output.to(tl.int64)[:, None] * (COLUMNS // 2)
    scales = output.to(tl.int64) * scale_stride
    # Outputs are the rows of the products: tensor cores take those of 16 or 64 from registers, and as few as 8 columns.
    sums = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    begin = tl.program_id(2) * split_tiles
    for tile in tl.range(begin, min(begin + split_tiles, tl.cdiv(COLUMNS, 2 * BYTES))):
        first = tile * (2 * BYTES)
        inside = first + column < COLUMNS
        x_mask = inside[:, None] & is_token[None, :]
        low = tl.load(x + (first + column)[:, None] * x_column_stride, x_mask, 0.0)
        high = tl.load(x + (first + column + HALF)[:, None] * x_column_stride, x_mask, 0.0)
        # Only these programs read these bytes, so they must not displace x in the last-level cache.
        w = tl.load(
            weight + (first // 2 + place)[None, :], is_output[:, None] & inside[None, :], 0,
            eviction_policy="evict_first",
        )  # fmt: skip
        of_group = scales + first // GROUP * scale_column_stride
        zero = tl.full([BLOCK_N, 1], NO_ZERO_POINT, tl.float32)
        if zero_point is not None:
            zero = tl.load(zero_point + of_group, is_output, 0).to(tl.float32)[:, None]
        w_low, w_high = dequantised_tile(w, zero, x.dtype.element_ty, PAIRED)
        product = tl.dot(w_low, low, input_precision="ieee")
        product = tl.dot(w_high, high, product, input_precision="ieee")
        sums += product * tl.load(scale + of_group, is_output, 0.0).to(tl.float32)[:, None]
    if bias is not None:
        sums += tl.load(bias + output, is_output, 0.0).to(tl.float32)[:, None]
    out += (tl.program_id(2) * num_tokens + token).to(tl.int64)[None, :] * num_outputs + output[:, None]
    tl.store(out, sums, is_output[:, None] & is_token[None, :])


@triton.jit(do_not_specialize=["num_splits", "num_sums", "num_outputs"])
def _sum_splits(
    sums, bias, out, num_splits, num_sums, num_outputs, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    pdl_wait(PDL)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_sums
    y = tl.zeros([BLOCK], tl.float32)
    for split in tl.range(num_splits):
        y += tl.load(sums + split * num_sums.to(tl.int64) + place, inside, 0.0)
    if bias is not None:
        y += tl.load(bias + place % num_outputs, inside, 0.0).to(tl.float32)
    tl.store(out + place, y, inside)


@triton.jit
def _dequantise(
    weight, scale, zero_point, out, scale_stride, scale_column_stride,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = place // HALF * (2 * HALF) + place % HALF
    inside = place < COLUMNS // 2
    w = tl.load(weight + row * (COLUMNS // 2) + place, inside, 0)
    of_group = row * scale_stride + column // GROUP * scale_column_stride
    zero = tl.full([BLOCK], NO_ZERO_POINT, tl.float32)
    if zero_point is not None:
        zero = tl.load(zero_point + of_group, inside, 0).to(tl.float32)
    s = tl.load(scale + of_group, inside, 0.0).to(tl.float32)
    out += row * COLUMNS + column
    low, high = dequantised_tile(w, zero, tl.float32, False)
    tl.store(out, low * s, inside)
    tl.store(out + HALF, high * s, inside)
