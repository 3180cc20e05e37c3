"""grouped_gemm with fp8 or int8 weights: `grouped_gemm`'s tiles, whose products are multiplied by their scales.

Scales of blocks are multiplied inside the loop over columns, and those of whole rows once after it. Factors are widened
as `_products.scaled` says. Results in fp32 are of widened factors too: fp8 tensor cores keep about 14 bits of a sum.
"""

import torch
import triton
import triton.language as tl

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._products.scaled import LEAST_COLUMNS, bits, product_of, scale_group
from vllm_opset.kernels.triton._products.tiles import Product, tile_of
from vllm_opset.targets import FP8 as FP8_FEATURE


def launch(product: Product, weight_scale: torch.Tensor, x_scale: torch.Tensor | None, tile: dict[str, int]) -> None:
    """Writes the product of the contract."""
    x, weight, columns = product.x, product.weight, product.x.shape[1]
    (w_rows, w_columns), w_strides = scale_group(weight[0], weight_scale[0])
    (_, x_columns), x_strides = ((1, columns), (0, 0)) if x_scale is None else scale_group(x, x_scale)
    widths = [width for width in (w_columns, x_columns) if width < columns]
    tile = tile | {"BLOCK_K": max(LEAST_COLUMNS, min([tile["BLOCK_K"], *widths]))}
    native = FP8_FEATURE in _launch.target(x.device).features and product.out.dtype is not torch.float32
    product._replace(x=bits(x), weight=bits(weight)).launch(
        _scaled_grouped_gemm, tile, weight_scale, weight_scale.stride(0), *w_strides, x_scale, *x_strides,
        W_ROWS=w_rows, W_COLUMNS=w_columns, X_COLUMNS=x_columns, BY_BLOCKS=bool(widths),
        NATIVE=x_scale is not None and native,
    )  # fmt: skip


@triton.jit
def _scales_of(pointers, mask, ONE: tl.constexpr):
    """The scales of a tile's rows of the weight. If all have the same one, it is loaded once."""
    if ONE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask, 0.0)


@triton.jit(do_not_specialize=["num_choices", "num_tiles"])
def _scaled_grouped_gemm(
    x, x_stride, weight, bias, weight_scale, ws_expert, ws_row, ws_column, x_scale, xs_row, xs_column,
    sorted_token_ids, expert_ids, out, num_choices, num_tiles, top_k,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, W_ROWS: tl.constexpr, W_COLUMNS: tl.constexpr,
    X_COLUMNS: tl.constexpr, BY_BLOCKS: tl.constexpr, NATIVE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILES: tl.constexpr, READ_ONCE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    tile, column = tile_of(tl.program_id(0), num_tiles, tl.cdiv(OUTPUTS, BLOCK_N), GROUP)
    first_output = column * BLOCK_N
    output = first_output + tl.arange(0, BLOCK_N)
    block, row = tile // TILES, tile % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = tl.load(expert_ids + block).to(tl.int64)
    choice = tl.load(sorted_token_ids + block * BLOCK_SIZE + row, row < BLOCK_SIZE, num_choices)
    is_choice, is_output = choice < num_choices, output < OUTPUTS
    place, source = tl.arange(0, BLOCK_K), choice // top_k
    x += source.to(tl.int64)[:, None] * x_stride + place[None, :]
    # Offsets in a tile have 32 bits, so a thread keeps one address of the weight and not one for each of its rows.
    weight += (expert * OUTPUTS + first_output) * COLUMNS
    weight += tl.arange(0, BLOCK_N)[None, :] * COLUMNS + place[:, None]
    # A tile of the weight that lies in one block has one scale.
    one_scale: tl.constexpr = W_ROWS >= OUTPUTS or W_ROWS % BLOCK_N == 0
    weight_scale += expert * ws_expert + (first_output if one_scale else output) // W_ROWS * ws_row
    if x_scale is not None:
        x_scale += source * xs_row
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(0, tl.where(expert < 0, 0, COLUMNS), BLOCK_K):
        inside = first + place < COLUMNS
        if COLUMNS % BLOCK_K == 0:
            a = tl.load(x + first, is_choice[:, None], 0)
            w_mask = is_output[None, :]
        else:
            a = tl.load(x + first, is_choice[:, None] & inside[None, :], 0)
            w_mask = is_output[None, :] & inside[:, None]
        if READ_ONCE:
            b = tl.load(weight + first, w_mask, 0, eviction_policy="evict_first")
        else:
            b = tl.load(weight + first, w_mask, 0)
        product = product_of(a, b, x_scale is not None, NATIVE)
        if BY_BLOCKS:
            scale = _scales_of(weight_scale + first // W_COLUMNS * ws_column, is_output, one_scale)
            if x_scale is not None:
                of_rows = tl.load(x_scale + first // X_COLUMNS * xs_column, is_choice, 0.0)
                if one_scale:
                    sums += product * (of_rows * scale)[:, None]
                else:
                    sums += product * of_rows[:, None] * scale[None, :]
            elif one_scale:
                sums += product * scale
            else:
                sums += product * scale[None, :]
        else:
            sums += product
    if not BY_BLOCKS:
        if one_scale:
            sums *= tl.load(weight_scale, expert >= 0, 0.0)
        else:
            sums *= tl.load(weight_scale, is_output & (expert >= 0), 0.0)[None, :]
        if x_scale is not None:
            sums *= tl.load(x_scale, is_choice & (expert >= 0), 0.0)[:, None]
    if bias is not None:
        sums += tl.load(bias + expert * OUTPUTS + output, is_output & (expert >= 0), 0.0).to(tl.float32)[None, :]
    out += choice.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    tl.store(out, sums, is_choice[:, None] & is_output[None, :])
