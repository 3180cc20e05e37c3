"""grouped_gemm with int4 weights: `grouped_gemm`'s tiles, whose weights are dequantised in registers.

A tile of the weight is multiplied as in `linear.packed`. Its rows are those of the product, so that few choices fill
tensor cores. The sum over the columns of one scale is multiplied by it.
"""

import torch
import triton
import triton.language as tl

from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._products.int4 import HALF, NO_ZERO_POINT, dequantised_tile, paired
from vllm_opset.kernels.triton._products.int4 import supports as supports_int4
from vllm_opset.kernels.triton._products.tiles import Product, tile_of
from vllm_opset.ops.contract import Problem
from vllm_opset.ops.schemes import WHOLE, Scheme, group_of


def supports(problem: Problem, scheme: Scheme) -> str | None:
    """Activations as they are by int4 weights, with scales for 32 columns or more."""
    if scheme.activation is not None:
        return f"it multiplies activations as they are by int4 weights, not {scheme}"
    return supports_int4(problem)


def launch(product: Product, weight_scale: torch.Tensor, zero_point: torch.Tensor | None, tile: dict[str, int]) -> None:
    """Writes the product of the contract."""
    num_outputs, columns = product.weight.shape[1], product.x.shape[1]
    group = group_of((num_outputs, columns), weight_scale.shape[1:]).columns
    group = columns if group == WHOLE else group
    width = min(tile.pop("BLOCK_K"), group if group < columns else columns & -columns)
    product.launch(
        _int4_grouped_gemm, tile, weight_scale, zero_point, *weight_scale.stride(),
        SCALED_COLUMNS=group, BYTES=width // 2, PAIRED=paired(product.x),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_choices", "num_tiles"])
def _int4_grouped_gemm(
    x, x_stride, weight, bias, weight_scale, zero_point, ws_expert, ws_row, ws_column, sorted_token_ids, expert_ids,
    out, num_choices, num_tiles, top_k,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, SCALED_COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILES: tl.constexpr, READ_ONCE: tl.constexpr, BYTES: tl.constexpr, PAIRED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    tile, column = tile_of(tl.program_id(0), num_tiles, tl.cdiv(OUTPUTS, BLOCK_N), GROUP)
    output = column * BLOCK_N + tl.arange(0, BLOCK_N)
    block, row = tile // TILES, tile % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = tl.load(expert_ids + block).to(tl.int64)
    choice = tl.load(sorted_token_ids + block * BLOCK_SIZE + row, row < BLOCK_SIZE, num_choices)
    is_choice, is_output = choice < num_choices, output < OUTPUTS
    place = tl.arange(0, BYTES)
    column = place // HALF * (2 * HALF) + place % HALF  # of the low four bits; the high ones are HALF further
    x += (choice // top_k).to(tl.int64)[None, :] * x_stride
    weight += (expert * OUTPUTS + output)[:, None] * (COLUMNS // 2) + place[None, :]
    scales = expert * ws_expert + output * ws_row
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in tl.range(0, tl.where(expert < 0, 0, COLUMNS), 2 * BYTES):
        inside = first + column < COLUMNS
        x_mask = inside[:, None] & is_choice[None, :]
        low = tl.load(x + (first + column)[:, None], x_mask, 0.0)
        high = tl.load(x + (first + column + HALF)[:, None], x_mask, 0.0)
        if READ_ONCE:
            w = tl.load(weight + first // 2, is_output[:, None] & inside[None, :], 0, eviction_policy="evict_first")
        else:
            w = tl.load(weight + first // 2, is_output[:, None] & inside[None, :], 0)
        of_group = scales + first // SCALED_COLUMNS * ws_column
        zero = tl.full([BLOCK_N, 1], NO_ZERO_POINT, tl.float32)
        if zero_point is not None:
            zero = tl.load(zero_point + of_group, is_output, 0).to(tl.float32)[:, None]
        w_low, w_high = dequantised_tile(w, zero, x.dtype.element_ty, PAIRED)
        product = tl.dot(w_low, low, input_precision="ieee")
        product = tl.dot(w_high, high, product, input_precision="ieee")
        sums += product * tl.load(weight_scale + of_group, is_output, 0.0).to(tl.float32)[:, None]
    if bias is not None:
        sums += tl.load(bias + expert * OUTPUTS + output, is_output & (expert >= 0), 0.0).to(tl.float32)[:, None]
    out += choice.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
    tl.store(out, sums, is_output[:, None] & is_choice[None, :])
