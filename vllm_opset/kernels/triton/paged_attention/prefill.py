"""The device code of paged_attention for many queries: a program attends one query tile over a share of its keys."""

import triton
import triton.language as tl

from vllm_opset.kernels.triton._launch import begin
from vllm_opset.kernels.triton.paged_attention._tile import attend, load_queries, seen_by_all
from vllm_opset.kernels.triton.paged_attention.combine import MERGED_ROWS, merge_rows, store_part, write

REQUESTS = tl.constexpr(256)  # whose starts are looked at together, when a tile looks for its request


@triton.jit(do_not_specialize=["num_reqs", "num_splits", "min_share"])
def attend_many(
    query, query_strides, cache, cache_strides, out, out_strides,
    query_start_loc, seq_lens, block_table, table_strides, num_reqs,
    scale, soft_cap, alibi_slopes, sinks, k_scale, v_scale,
    partials, maxima, num_splits, min_share,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program for each KV head, share of the keys and query tile, in this order. SPLIT: whether there may be more
    than one share of a tile's keys; what they give is stored then.
    """
    begin(OVERLAP)
    program = tl.program_id(0)
    head, split = program % NUM_KV_HEADS, program // NUM_KV_HEADS % num_splits
    tile = program // (NUM_KV_HEADS * num_splits)
    request, first_token, num_queries, first_position, seq_len = _queries(
        tile, query_start_loc, seq_lens, num_reqs, BLOCK_M // GROUP
    )
    low, high, origin, share, num_shares = _keys(
        first_position, num_queries, seq_len, num_splits, min_share, LEFT, RIGHT, BLOCK_N
    )
    if (num_queries <= 0) | (split >= num_shares):
        return
    first, last = origin + split * share, min(high, origin + (split + 1) * share)

    last_position = first_position + num_queries - 1
    full_first, full_last = seen_by_all(first, last, first_position, last_position, LEFT, RIGHT, BLOCK_N)
    num_rows = num_queries * GROUP
    q = load_queries(query, query_strides, first_token, head, num_rows, GROUP, HEAD_SIZE, BLOCK_M, BLOCK_D)
    if k_scale is not None:
        scale *= tl.load(k_scale)
    acc, top, total = attend(
        q, head, first_position, scale, soft_cap, alibi_slopes,
        cache + head.to(tl.int64) * cache_strides[1], cache_strides,
        block_table + request.to(tl.int64) * table_strides[0], table_strides[1],
        first, last, full_first, full_last, low,
        GROUP, LEFT, RIGHT, HEAD_SIZE, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    stored = False
    if SPLIT:
        stored = num_shares > 1
        if stored:
            part = (tile * NUM_KV_HEADS + head) * num_splits + split
            store_part(acc, top, total, partials, maxima, part, num_rows, BLOCK_M, BLOCK_D)
    if not stored:
        row = tl.arange(0, BLOCK_M)
        write(
            acc, top, total, row, num_rows, out, out_strides, first_token, head, sinks, v_scale,
            GROUP, HEAD_SIZE, BLOCK_D,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_reqs", "num_splits", "min_share"])
def merge_many(
    out, out_strides, query_start_loc, seq_lens, num_reqs, sinks, v_scale, partials, maxima, num_splits, min_share,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Adds up what attend_many has stored: one program for each KV head and query tile, in this order, and for each
    MERGED_ROWS rows.
    """
    begin(OVERLAP)
    head, tile = tl.program_id(0) % NUM_KV_HEADS, tl.program_id(0) // NUM_KV_HEADS
    _, first_token, num_queries, first_position, seq_len = _queries(
        tile, query_start_loc, seq_lens, num_reqs, BLOCK_M // GROUP
    )
    _, _, _, _, num_shares = _keys(
        first_position, num_queries, seq_len, num_splits, min_share, LEFT, RIGHT, BLOCK_N
    )  # fmt: skip
    first_row, num_rows = tl.program_id(1) * MERGED_ROWS, num_queries * GROUP
    if (num_shares > 1) & (first_row < num_rows):
        first_part = (tile * NUM_KV_HEADS + head) * num_splits
        merge_rows(
            first_row, partials, maxima, first_part, num_shares, num_rows,
            out, out_strides, first_token, head, sinks, v_scale, GROUP, HEAD_SIZE, BLOCK_M, BLOCK_D,
        )  # fmt: skip


@triton.jit
def _queries(tile, query_start_loc, seq_lens, num_reqs, QUERIES: tl.constexpr):
    """The request of a tile, its first token in the batch, how many queries it has, none if it is empty, the position
    of the first, and the request's keys.
    """
    request = _request_of(tile, query_start_loc, num_reqs, QUERIES)
    first_token, seq_len = tl.load(query_start_loc + request), tl.load(seq_lens + request)
    query_len = tl.load(query_start_loc + request + 1) - first_token
    first_query, num_queries = queries_of(tile, first_token, query_len, num_reqs, QUERIES)
    return request, first_token + first_query, num_queries, seq_len - query_len + first_query, seq_len


@triton.jit
def _keys(
    first_position, num_queries, seq_len, num_splits, min_share,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The keys low … high - 1 that some query of a tile sees; from where on they are shared out, in whole blocks; how
    many are a share, and how many shares they are.
    """
    low, high = 0, seq_len
    if LEFT is not None:
        low = max(0, first_position - LEFT)
    if RIGHT is not None:
        high = min(high, first_position + num_queries + RIGHT)
    origin = low // BLOCK_N * BLOCK_N
    share = tl.cdiv(max(min_share, tl.cdiv(high - origin, num_splits)), BLOCK_N) * BLOCK_N
    num_shares = max(1, tl.cdiv(high - origin, share))  # the one of a tile that sees nothing writes zeros
    return low, high, origin, share, num_shares


@triton.jit
def _request_of(tile, query_start_loc, num_reqs, QUERIES: tl.constexpr):
    """The request of a tile.

    The first tile of each request comes first: of a token that is decoded it is the only one, and may take longer than
    any other. Then come the other tiles of each request, the last one first, since it sees the most keys. So no program
    is left with a long one when all others have ended. Those of request r start at num_reqs + query_start_loc[r] //
    QUERIES: that leaves room for all, and a few stay empty.
    """
    request = tile
    if tile >= num_reqs:
        request = -1
        for first in range(0, num_reqs, REQUESTS):
            candidate = first + tl.arange(0, REQUESTS)
            start = tl.load(query_start_loc + candidate, candidate < num_reqs, 0)
            started = (start // QUERIES <= tile - num_reqs) & (candidate < num_reqs)
            request += tl.sum(started.to(tl.int32))
    return request


@triton.jit
def queries_of(tile, first_token, query_len, num_reqs, QUERIES: tl.constexpr):
    """Which queries of its request a tile has: the first one, and how many; none if it is empty."""
    number = tl.where(tile < num_reqs, 0, (first_token + query_len) // QUERIES - (tile - num_reqs))
    exists = (tile < num_reqs) | (number > 0)
    return number * QUERIES, tl.where(exists, min(QUERIES, query_len - number * QUERIES), 0)
