"""grouped_gemm with weights in fp32, bf16 or fp16."""

import triton
import triton.language as tl

from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._products.tiles import Product, tile_of


def launch(product: Product, tile: dict[str, int]) -> None:
    """Writes the product of the contract."""
    product.launch(_grouped_gemm, tile)


@triton.jit(do_not_specialize=["num_choices", "num_tiles"])
def _grouped_gemm(
    x, x_stride, weight, bias, sorted_token_ids, expert_ids, out, num_choices, num_tiles, top_k,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILES: tl.constexpr,
    READ_ONCE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    tile, column = tile_of(tl.program_id(0), num_tiles, tl.cdiv(OUTPUTS, BLOCK_N), GROUP)
    output = column * BLOCK_N + tl.arange(0, BLOCK_N)
    block, row = tile // TILES, tile % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = tl.load(expert_ids + block).to(tl.int64)
    choice = tl.load(sorted_token_ids + block * BLOCK_SIZE + row, row < BLOCK_SIZE, num_choices)
    is_choice, is_output = choice < num_choices, output < OUTPUTS
    place = tl.arange(0, BLOCK_K)
    x += (choice // top_k).to(tl.int64)[:, None] * x_stride + place[None, :]
    weight += (expert * OUTPUTS + output)[None, :] * COLUMNS + place[:, None]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(0, tl.where(expert < 0, 0, COLUMNS), BLOCK_K):
        if COLUMNS % BLOCK_K == 0:
            a = tl.load(x + first, is_choice[:, None], 0.0)
            b = _load_weight(weight + first, is_output[None, :], READ_ONCE)
        else:
            inside = first + place < COLUMNS
            a = tl.load(x + first, is_choice[:, None] & inside[None, :], 0.0)
            b = _load_weight(weight + first, is_output[None, :] & inside[:, None], READ_ONCE)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + expert * OUTPUTS + output, is_output & (expert >= 0), 0.0).to(tl.float32)[None, :]
    out += choice.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    tl.store(out, sums, is_choice[:, None] & is_output[None, :])


@triton.jit
def _load_weight(pointers, mask, READ_ONCE: tl.constexpr):
    """A tile of the weight. If only one program reads it, it must not displace other data in the last-level cache."""
    if READ_ONCE:
        return tl.load(pointers, mask, 0.0, eviction_policy="evict_first")
    else:
        return tl.load(pointers, mask, 0.0)
