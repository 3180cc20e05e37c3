"""The device code of paged_attention for many queries: a program attends one query tile over a share of its keys."""

import triton
import triton.language as tl

from vllm_opset.kernels.triton._launch import begin
from vllm_opset.kernels.triton._paged_attention import attend, load_queries, merge_or_write, seen_by_all

REQUESTS = tl.constexpr(256)  # whose starts are looked at together, when a tile looks for its request


@triton.jit(do_not_specialize=["num_reqs", "num_splits", "min_share"])
def attend_many(
    query, query_strides, cache, cache_strides, out, out_strides,
    query_start_loc, seq_lens, block_table, table_strides, num_reqs,
    scale, soft_cap, alibi_slopes, sinks, k_scale, v_scale,
    partials, maxima, tickets, num_splits, min_share,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program for each KV head, share of the keys and query tile, in this order; the last tiles come first, since
    they see the most keys.
    """
    begin(OVERLAP)
    program = tl.program_id(0)
    head, split = program % NUM_KV_HEADS, program // NUM_KV_HEADS % num_splits
    tile = (tl.num_programs(0) - 1 - program) // (NUM_KV_HEADS * num_splits)
    request = _request_of(tile, query_start_loc, num_reqs, BLOCK_M // GROUP)
    first_token, seq_len = tl.load(query_start_loc + request), tl.load(seq_lens + request)
    query_len = tl.load(query_start_loc + request + 1) - first_token
    first_query = (tile - first_token // (BLOCK_M // GROUP) - request) * (BLOCK_M // GROUP)
    num_queries = min(BLOCK_M // GROUP, query_len - first_query)
    if num_queries <= 0:
        return
    first_token += first_query
    first_position = seq_len - query_len + first_query
    last_position = first_position + num_queries - 1

    low, high = 0, seq_len  # the keys that some query of the tile sees
    if LEFT is not None:
        low = max(0, first_position - LEFT)
    if RIGHT is not None:
        high = min(high, last_position + RIGHT + 1)
    origin = low // BLOCK_N * BLOCK_N
    share = tl.cdiv(max(min_share, tl.cdiv(high - origin, num_splits)), BLOCK_N) * BLOCK_N
    num_shares = max(1, tl.cdiv(high - origin, share))  # the one of a tile that sees nothing writes zeros
    if split >= num_shares:
        return
    first, last = origin + split * share, min(high, origin + (split + 1) * share)

    full_first, full_last = seen_by_all(first, last, first_position, last_position, LEFT, RIGHT, BLOCK_N)
    q = load_queries(query, query_strides, first_token, head, num_queries * GROUP, GROUP, HEAD_SIZE, BLOCK_M, BLOCK_D)
    if k_scale is not None:
        scale *= tl.load(k_scale)
    acc, top, total = attend(
        q, head, first_position, scale, soft_cap, alibi_slopes,
        cache + head.to(tl.int64) * cache_strides[1], cache_strides,
        block_table + request.to(tl.int64) * table_strides[0], table_strides[1],
        first, last, full_first, full_last, low,
        GROUP, LEFT, RIGHT, HEAD_SIZE, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    item = tile * NUM_KV_HEADS + head
    merge_or_write(
        acc, top, total, partials, maxima, tickets, item, item * num_splits, split, num_shares, num_queries * GROUP,
        out, out_strides, first_token, head, sinks, v_scale, SPLIT, GROUP, HEAD_SIZE, BLOCK_M, BLOCK_D,
    )  # fmt: skip


@triton.jit
def _request_of(tile, query_start_loc, num_reqs, QUERIES: tl.constexpr):
    """The request of a tile.

    The tiles of request r start at query_start_loc[r] // QUERIES + r: that leaves room for all, and a few stay empty.
    """
    request = -1
    for first in range(0, num_reqs, REQUESTS):
        candidate = first + tl.arange(0, REQUESTS)
        start = tl.load(query_start_loc + candidate, candidate < num_reqs, 0)
        started = (start // QUERIES + candidate <= tile) & (candidate < num_reqs)
        request += tl.sum(started.to(tl.int32))
    return request
