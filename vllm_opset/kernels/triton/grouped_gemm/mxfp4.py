"""grouped_gemm with MXFP4 weights: `grouped_gemm`'s tiles, whose weights become bf16 in registers.

Triton's `dot_scaled` widens the weights, or leaves them to tensor cores that multiply MXFP4. Programs of few rows are
bound by reading the packed weights. They read the scales of one column of groups at a time, so scales that lie column
by column (see `by_columns`) are read in whole cache lines.
"""

import torch
import triton
import triton.language as tl

from vllm_opset.kernels.triton import launched_for
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._products.tiles import Product, tile_of
from vllm_opset.ops.contract import Problem
from vllm_opset.ops.schemes import MXFP4, Scheme

GROUP_SIZE = MXFP4.group.columns
LEAST_COLUMNS = 2 * GROUP_SIZE  # the fewest that are multiplied at a time; the compiler takes no fewer
# The names of dot_scaled's formats. The interpreter takes them as constants alone.
E2M1, BF16 = tl.constexpr("e2m1"), tl.constexpr("bf16")


def supports(problem: Problem, scheme: Scheme) -> str | None:
    """bf16 by MXFP4 weights, on NVIDIA GPUs: bf16 holds all of their values, and fp16 does not."""
    target = launched_for(problem.target)
    if target.vendor != "nvidia":
        return f"Triton compiles these products for NVIDIA GPUs, and fails for {target}"
    if scheme.activation is not None:
        return f"it multiplies activations as they are by MXFP4 weights, not {scheme}"
    if problem.dtype is not torch.bfloat16:
        return f"it multiplies bfloat16 by MXFP4 weights, not {str(problem.dtype).removeprefix('torch.')}"
    return None


def by_columns(scale: torch.Tensor) -> torch.Tensor:
    """The same scales, whose columns are dense."""
    return scale.mT.contiguous().mT


def launch(product: Product, weight_scale: torch.Tensor, tile: dict[str, int]) -> None:
    """Writes the product of the contract."""
    tile = tile | {"BLOCK_K": max(LEAST_COLUMNS, tile["BLOCK_K"])}
    product.launch(_mxfp4_grouped_gemm, tile, weight_scale, *weight_scale.stride(), GROUP_SIZE=GROUP_SIZE)


@triton.jit(do_not_specialize=["num_choices", "num_tiles"])
def _mxfp4_grouped_gemm(
    x, x_stride, weight, bias, weight_scale, ws_expert, ws_row, ws_column, sorted_token_ids, expert_ids, out,
    num_choices, num_tiles, top_k,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILES: tl.constexpr, READ_ONCE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    tile, column = tile_of(tl.program_id(0), num_tiles, tl.cdiv(OUTPUTS, BLOCK_N), GROUP)
    output = column * BLOCK_N + tl.arange(0, BLOCK_N)
    block, row = tile // TILES, tile % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = tl.load(expert_ids + block).to(tl.int64)
    choice = tl.load(sorted_token_ids + block * BLOCK_SIZE + row, row < BLOCK_SIZE, num_choices)
    is_choice, is_output = choice < num_choices, output < OUTPUTS
    place, byte, group = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 2), tl.arange(0, BLOCK_K // GROUP_SIZE)
    x += (choice // top_k).to(tl.int64)[:, None] * x_stride + place[None, :]
    weight += (expert * OUTPUTS + output)[None, :] * (COLUMNS // 2) + byte[:, None]
    weight_scale += expert * ws_expert + output[None, :] * ws_row + group[:, None] * ws_column
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(0, tl.where(expert < 0, 0, COLUMNS), BLOCK_K):
        if COLUMNS % BLOCK_K == 0:
            x_mask, byte_mask, group_mask = is_choice[:, None], is_output[None, :], is_output[None, :]
        else:
            x_mask = is_choice[:, None] & (first + place < COLUMNS)[None, :]
            byte_mask = is_output[None, :] & (first // 2 + byte < COLUMNS // 2)[:, None]
            group_mask = is_output[None, :] & (first // GROUP_SIZE + group < COLUMNS // GROUP_SIZE)[:, None]
        a = tl.load(x + first, x_mask, 0.0)
        if READ_ONCE:
            b = tl.load(weight + first // 2, byte_mask, 0, eviction_policy="evict_first")
        else:
            b = tl.load(weight + first // 2, byte_mask, 0)
        scale = tl.load(weight_scale + first // GROUP_SIZE * ws_column, group_mask, 0)
        # Scales are numbers: a layer refuses others when it is loaded. fast_math leaves out the question for NaN.
        sums = tl.dot_scaled(a, None, BF16, b, scale.trans(), E2M1, sums, fast_math=True)
    if bias is not None:
        sums += tl.load(bias + expert * OUTPUTS + output, is_output & (expert >= 0), 0.0).to(tl.float32)[None, :]
    out += choice.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    tl.store(out, sums, is_choice[:, None] & is_output[None, :])
