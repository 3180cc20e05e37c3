"""The kernels of paged_attention for prefill: a program attends one query tile over a split of its keys."""

import triton
import triton.language as tl

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton.paged_attention import _call
from vllm_opset.kernels.triton.paged_attention._call import ROW_BYTES, WARPGROUP, Call, tile_rows
from vllm_opset.kernels.triton.paged_attention._tile import attend, load_queries, seen_by_all
from vllm_opset.kernels.triton.paged_attention.combine import combine_rows, store_partial, write

REQUESTS = tl.constexpr(256)  # searched at a time for the request of a tile; any number is right
COMBINED_ROWS = 4  # of a tile, that one program of combine_prefill combines


@triton.jit(do_not_specialize=["num_reqs", "num_splits", "min_split_keys"])
def attend_prefill(
    query, query_strides, cache, cache_strides, out, out_strides,
    query_start_loc, seq_lens, block_table, table_strides, num_reqs,
    scale, soft_cap, alibi_slopes, sinks, k_scale, v_scale,
    partials, stats, num_splits, min_split_keys,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Launches one program for each KV head, split and query tile; the KV head varies fastest.

    SPLIT: whether a tile's keys may have more than one split. Partial results are stored then, for combine_prefill.
    """
    pdl_wait(PDL)
    program = tl.program_id(0)
    head, split = program % NUM_KV_HEADS, program // NUM_KV_HEADS % num_splits
    tile = program // (NUM_KV_HEADS * num_splits)
    request, first_token, num_queries, first_position, seq_len = _queries(
        tile, query_start_loc, seq_lens, num_reqs, BLOCK_M // GROUP
    )
    low, high, origin, split_keys, num_used_splits = split_keys_of(
        first_position, num_queries, seq_len, num_splits, min_split_keys, LEFT, RIGHT, BLOCK_N
    )
    if (num_queries <= 0) | (split >= num_used_splits):
        return
    first, last = origin + split * split_keys, min(high, origin + (split + 1) * split_keys)

    last_position = first_position + num_queries - 1
    full_first, full_last = seen_by_all(first, last, first_position, last_position, LEFT, RIGHT, BLOCK_N)
    num_rows = num_queries * GROUP
    q = load_queries(query, query_strides, first_token, head, num_rows, GROUP, HEAD_SIZE, BLOCK_M, BLOCK_D)
    if k_scale is not None:
        scale *= tl.load(k_scale)
    acc, m_i, l_i = attend(
        q, head, first_position, scale, soft_cap, alibi_slopes,
        cache + head.to(tl.int64) * cache_strides[1], cache_strides,
        block_table + request.to(tl.int64) * table_strides[0], table_strides[1],
        first, last, full_first, full_last, low,
        GROUP, LEFT, RIGHT, HEAD_SIZE, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    stored = False
    if SPLIT:
        stored = num_used_splits > 1
        if stored:
            partial = (tile * NUM_KV_HEADS + head) * num_splits + split
            store_partial(acc, m_i, l_i, partials, stats, partial, num_rows, BLOCK_M, BLOCK_D)
    if not stored:
        row = tl.arange(0, BLOCK_M)
        write(
            acc, m_i, l_i, row, num_rows, out, out_strides, first_token, head, sinks, v_scale,
            GROUP, HEAD_SIZE, BLOCK_D,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_reqs", "num_splits", "min_split_keys"])
def combine_prefill(
    out, out_strides, query_start_loc, seq_lens, num_reqs, sinks, v_scale, partials, stats, num_splits, min_split_keys,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combines the partial results of attend_prefill.

    Launches one program for each KV head and query tile (the KV head varies fastest) and for every ROWS rows. The loads
    before `pdl_wait` read the batch, which is older than these.
    """
    head, tile = tl.program_id(0) % NUM_KV_HEADS, tl.program_id(0) // NUM_KV_HEADS
    _, first_token, num_queries, first_position, seq_len = _queries(
        tile, query_start_loc, seq_lens, num_reqs, BLOCK_M // GROUP
    )
    _, _, _, _, num_used_splits = split_keys_of(
        first_position, num_queries, seq_len, num_splits, min_split_keys, LEFT, RIGHT, BLOCK_N
    )
    pdl_wait(PDL)
    first_row, num_rows = tl.program_id(1) * ROWS, num_queries * GROUP
    if (num_used_splits > 1) & (first_row < num_rows):
        first_partial = (tile * NUM_KV_HEADS + head) * num_splits
        combine_rows(
            first_row, partials, stats, first_partial, num_used_splits, num_rows,
            out, out_strides, first_token, head, sinks, v_scale, GROUP, HEAD_SIZE, ROWS, BLOCK_M, BLOCK_D,
        )  # fmt: skip


@triton.jit
def _queries(tile, query_start_loc, seq_lens, num_reqs, QUERIES: tl.constexpr):
    """A tile's request, first token in the batch, number of queries (none if it is empty), the first query's position,
    and the request's number of keys.
    """
    request = _request_of(tile, query_start_loc, num_reqs, QUERIES)
    first_token, seq_len = tl.load(query_start_loc + request), tl.load(seq_lens + request)
    query_len = tl.load(query_start_loc + request + 1) - first_token
    first_query, num_queries = queries_of(tile, first_token, query_len, num_reqs, QUERIES)
    return request, first_token + first_query, num_queries, seq_len - query_len + first_query, seq_len


@triton.jit
def split_keys_of(
    first_position, num_queries, seq_len, num_splits, min_split_keys,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """low, high, origin, split_keys and num_used_splits of a tile.

    Some query of the tile sees the keys low … high - 1. Splits start at the origin, a multiple of BLOCK_N. A split has
    split_keys keys, which are whole blocks.
    """
    low, high = 0, seq_len
    if LEFT is not None:
        low = max(0, first_position - LEFT)
    if RIGHT is not None:
        high = min(high, first_position + num_queries + RIGHT)
    origin = low // BLOCK_N * BLOCK_N
    split_keys = tl.cdiv(max(min_split_keys, tl.cdiv(high - origin, num_splits)), BLOCK_N) * BLOCK_N
    # A tile that sees no key has one split, which writes zeros.
    num_used_splits = max(1, tl.cdiv(high - origin, split_keys))
    return low, high, origin, split_keys, num_used_splits


@triton.jit
def _request_of(tile, query_start_loc, num_reqs, QUERIES: tl.constexpr):
    """The request of a tile.

    The first tile of each request comes first. A decoded token has no other one, and it may take longer than any
    other tile. Then come the other tiles of each request, last ones first, because those see the most keys. So no
    program is left with a long tile after all others have ended. The other tiles of request r start at num_reqs +
    query_start_loc[r] // QUERIES. That leaves room for all of them, and a few places stay empty.
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
    """The first query of a tile within its request, and the number of its queries; none if it is empty."""
    number = tl.where(tile < num_reqs, 0, (first_token + query_len) // QUERIES - (tile - num_reqs))
    exists = (tile < num_reqs) | (number > 0)
    return number * QUERIES, tl.where(exists, tl.minimum(QUERIES, query_len - number * QUERIES), 0)


def launch_prefill(call: Call) -> None:
    """One launch, and another to combine partial results where keys are split."""
    num_tokens, num_heads, _ = call.query.shape
    device, num_kv_heads, group = call.query.device, call.num_kv_heads, call.group
    values = _launch.parameters("paged_attention_prefill", device, num_tokens * num_heads)
    rows = tile_rows(values["rows"] * ROW_BYTES // max(ROW_BYTES, call.row_bytes), group, call.query.dtype)
    block_n, split_keys = call.block_n(values), values["split_keys"]
    num_tiles = (num_tokens // (rows // group) + call.num_reqs) * num_kv_heads
    num_splits = _most_splits(call, values, num_tiles, rows)
    partials = (None, None)
    if num_splits > 1:
        partials = call.batch.once(_call.workspace, num_tiles * num_splits, rows, call.block_d)
    _launch.launch(
        attend_prefill, (num_tiles * num_splits,),
        *call.attend_arguments(), *partials, num_splits, split_keys, NUM_KV_HEADS=num_kv_heads, GROUP=group,
        HEAD_SIZE=call.head_size, BLOCK_SIZE=call.block_size, LEFT=call.left, RIGHT=call.right, SPLIT=num_splits > 1,
        BLOCK_M=rows, BLOCK_N=block_n, BLOCK_D=call.block_d, num_warps=values["warps"], num_stages=values["stages"],
        **_launch.launch_options(device),
    )  # fmt: skip
    if num_splits > 1:
        _launch_combine(call, partials, num_tiles, num_splits, split_keys, rows, block_n)


def _most_splits(call: Call, values: _launch.Parameters, num_tiles: int, rows: int) -> int:
    """The most splits of a tile of so many rows: as many as fill the GPU, if each has its minimum of keys."""
    most_keys = call.span(rows // call.group)
    fitting = _launch.cdiv(most_keys, max(call.block_n(values), values["split_keys"]))
    return max(1, min(values["programs"] * _launch.multiprocessors(call.query.device) // num_tiles, fitting))


def _launch_combine(
    call: Call, partials: tuple, num_tiles: int, num_splits: int, split_keys: int, rows: int, block_n: int
) -> None:
    """Combines partial results. rows: of a tile. split_keys: see `split_keys_of`."""
    _launch.launch(
        combine_prefill, (num_tiles, _launch.cdiv(min(rows, call.most_rows), COMBINED_ROWS)),
        *call.combine_arguments(), *partials, num_splits, split_keys,
        NUM_KV_HEADS=call.num_kv_heads, GROUP=call.group, HEAD_SIZE=call.head_size, LEFT=call.left, RIGHT=call.right,
        ROWS=COMBINED_ROWS, BLOCK_M=rows, BLOCK_N=block_n, BLOCK_D=call.block_d, num_warps=WARPGROUP,
        **_launch.launch_options(call.query.device),
    )  # fmt: skip
