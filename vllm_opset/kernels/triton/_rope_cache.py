"""One launch for rope_cache and qk_norm_rope_cache, which differ in whether the heads are normalised first.

A program takes one token and a group of its heads: some query heads, and a share of the key and value heads. None of
its loads depends on the slot, so all loads are in flight together.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._cache import slot_start, to_cache_dtype
from vllm_opset.kernels.triton._heads import (
    Shape,
    grouped,
    heads,
    load_angles,
    load_heads,
    normalised,
    rotated,
    store_pairs,
    store_rest,
)
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._rows import EVICT_LAST


class Norms(NamedTuple):
    """The norms of the query and key heads. Without weights, there is no norm."""

    q_weight: torch.Tensor | None = None
    k_weight: torch.Tensor | None = None
    epsilon: float = 0.0
    weight_offset: float = 0.0


def launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    norms: Norms,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Launches the kernel. The arguments are those of `ops.qk_norm_rope_cache`, already checked."""
    tokens, _, head_size = query.shape
    constants = _launch.launch_options(query.device) | grouped(
        query, key, head_size, **_launch.parameters("rope_cache", query.device, tokens)
    )
    _launch.launch(
        _rope_cache, (tokens * constants["GROUPS"],),
        query, heads(query, head_size), key, heads(key, head_size), value, heads(value, head_size), norms,
        positions, positions.stride(0), cos_sin_cache, cos_sin_cache.stride(),
        kv_cache, kv_cache.stride(), slot_mapping, slot_mapping.stride(0), slot_mapping.shape[0], k_scale, v_scale,
        SHAPE=Shape.of(head_size, cos_sin_cache.shape[1], is_neox_style),
        HEAD_SIZE=head_size, HEAD_BLOCK=_launch.next_power_of_2(head_size),
        BLOCK_SIZE=kv_cache.shape[2], FP8=kv_cache.dtype == torch.float8_e4m3fn, **constants,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_slots"])
def _rope_cache(
    query, query_heads, key, key_heads, value, value_heads, norms,
    positions, position_stride, table, table_strides,
    kv_cache, cache_strides, slot_mapping, slot_stride, num_slots, k_scale, v_scale,
    SHAPE: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, FP8: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    token = (tl.program_id(0) // GROUPS).to(tl.int64)
    group = tl.program_id(0) % GROUPS
    slot = tl.load(slot_mapping + token * slot_stride, token < num_slots, -1)
    position = tl.load(positions + token * position_stride)

    head = group * HEADS + tl.arange(0, HEADS)[:, None]
    kv_head = group * KV_HEADS + tl.arange(0, KV_HEADS)[:, None]
    column = tl.arange(0, HEAD_BLOCK)[None, :]
    in_query, in_key = head < NUM_HEADS, kv_head < NUM_KV_HEADS
    query += token * query_heads.token + head * query_heads.head
    key += token * key_heads.token + kv_head * key_heads.head
    value += token * value_heads.token + kv_head * value_heads.head + column * value_heads.column
    a, b, q_rest = load_heads(query, query_heads.column, in_query, SHAPE)
    c, d, k_rest = load_heads(key, key_heads.column, in_key, SHAPE)
    values = tl.load(value, in_key & (column < HEAD_SIZE), eviction_policy=EVICT_LAST)
    cos, sin = load_angles(table, table_strides, position, in_query, SHAPE)
    kv_cos, kv_sin = load_angles(table, table_strides, position, in_key, SHAPE)

    if norms.q_weight is not None:
        a, b, q_rest = normalised(a, b, q_rest, norms.q_weight, norms.epsilon, norms.weight_offset, SHAPE)
        c, d, k_rest = normalised(c, d, k_rest, norms.k_weight, norms.epsilon, norms.weight_offset, SHAPE)
        store_rest(query, query_heads.column, in_query, q_rest, SHAPE)
    a, b = rotated(a, b, cos, sin)
    c, d = rotated(c, d, kv_cos, kv_sin)
    store_pairs(query, query_heads.column, in_query, a, b, SHAPE)

    in_cache = in_key & (slot >= 0)
    start = slot_start(kv_cache, cache_strides, slot, kv_head, BLOCK_SIZE)
    store_pairs(
        start, cache_strides[3], in_cache, to_cache_dtype(c, k_scale, FP8), to_cache_dtype(d, k_scale, FP8), SHAPE
    )
    store_rest(start, cache_strides[3], in_cache, to_cache_dtype(k_rest, k_scale, FP8), SHAPE)
    start += (HEAD_SIZE + column) * cache_strides[3]
    tl.store(start, to_cache_dtype(values, v_scale, FP8), in_cache & (column < HEAD_SIZE))
