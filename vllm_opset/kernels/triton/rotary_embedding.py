"""rotary_embedding: one launch for query and key. A program rotates a group of one token's heads by the same angles."""

import torch
import triton
import triton.language as tl

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _launch, _supports
from vllm_opset.kernels.triton._heads import (
    Shape,
    grouped,
    heads,
    load_angles,
    load_heads,
    rotated,
    store_pairs,
)
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.ops.rope.rotary_embedding import check_arguments


@kernel(ops.rotary_embedding, name="triton", supports=_supports.floats)
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool = True,
) -> None:
    rotary_dim = check_arguments(positions, query, key, head_size, cos_sin_cache)
    tokens = len(positions)
    launch = _launch.early_launch_options(query.device, tokens, "rotary_early_launch") | grouped(
        query, key, head_size, **_launch.parameters("rotary_embedding", query.device, tokens)
    )
    _launch.launch(
        _rotary_embedding, (tokens * launch["GROUPS"],),
        positions, positions.stride(0), cos_sin_cache, cos_sin_cache.stride(),
        query, heads(query, head_size), key, heads(key, head_size),
        SHAPE=Shape.of(head_size, rotary_dim, is_neox_style), **launch,
    )  # fmt: skip


@triton.jit
def _rotary_embedding(
    positions, position_stride, table, table_strides,
    query, query_heads, key, key_heads,
    SHAPE: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    token = (tl.program_id(0) // GROUPS).to(tl.int64)
    group = tl.program_id(0) % GROUPS
    position = tl.load(positions + token * position_stride)

    head = group * HEADS + tl.arange(0, HEADS)[:, None]
    query += token * query_heads.token + head * query_heads.head
    a, b, _ = load_heads(query, query_heads.column, head < NUM_HEADS, SHAPE)
    if key is not None:
        kv_head = group * KV_HEADS + tl.arange(0, KV_HEADS)[:, None]
        key += token * key_heads.token + kv_head * key_heads.head
        c, d, _ = load_heads(key, key_heads.column, kv_head < NUM_KV_HEADS, SHAPE)
    tl.debug_barrier()  # otherwise the compiler waits for the position before it loads the heads
    cos, sin = load_angles(table, table_strides, position, head < NUM_HEADS, SHAPE)
    if key is not None:
        kv_cos, kv_sin = load_angles(table, table_strides, position, kv_head < NUM_KV_HEADS, SHAPE)

    a, b = rotated(a, b, cos, sin)
    store_pairs(query, query_heads.column, head < NUM_HEADS, a, b, SHAPE)
    if key is not None:
        c, d = rotated(c, d, kv_cos, kv_sin)
        store_pairs(key, key_heads.column, kv_head < NUM_KV_HEADS, c, d, SHAPE)
