"""The device code of paged_attention.

A program attends one query tile of one request over a share of the keys that the tile sees. The rows of a tile are
query tokens times the query heads of one KV head, so each key and value is loaded once for all of them. Scores and
their maxima are in units of log2, for exp2.
"""

import triton
import triton.language as tl

from vllm_opset.kernels.triton._launch import begin

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e38)  # the maximum of no scores; finite, so that differences of maxima are never NaN
REQUESTS = tl.constexpr(256)  # whose starts are looked at together, when a tile looks for its request
# The keys that a program attends in the time that merging one more part takes, measured on an H200. Attending a share
# and merging all take least together if a share is the square root of this times all keys.
MERGE_KEYS = tl.constexpr(5.0)
MERGED_ROWS = tl.constexpr(4)  # rows that are merged together: those of a decoded token of most models
MERGED_ELEMENTS = tl.constexpr(2048)  # of a merged row's partial results that are in flight together


@triton.jit(do_not_specialize=["num_reqs", "num_splits", "min_share"])
def paged_attention(
    query, query_strides, cache, cache_strides, out, out_strides,
    query_start_loc, seq_lens, block_table, table_strides, num_reqs,
    scale, soft_cap, alibi_slopes, sinks, k_scale, v_scale,
    partials, maxima, tickets, num_splits, min_share,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, ONE_TILE: tl.constexpr, ONE_PASS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program for each KV head, share of the keys and query tile, in this order; the last tiles come first, since
    they see the most keys. ONE_TILE: no request has more than one tile. ONE_PASS: masks are applied to all keys.
    """
    begin(OVERLAP)
    program = tl.program_id(0)
    head, split = program % NUM_KV_HEADS, program // NUM_KV_HEADS % num_splits
    tile = (tl.num_programs(0) - 1 - program) // (NUM_KV_HEADS * num_splits)
    request, first_query = tile, 0
    if not ONE_TILE:
        request = _request_of(tile, query_start_loc, num_reqs, BLOCK_M // GROUP)
    first_token, seq_len = tl.load(query_start_loc + request), tl.load(seq_lens + request)
    query_len = tl.load(query_start_loc + request + 1) - first_token
    if not ONE_TILE:
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
    if SPLIT:
        quickest = tl.sqrt(max(0, high - origin).to(tl.float32) * MERGE_KEYS)
        share = max(share, (quickest / BLOCK_N + 0.5).to(tl.int32) * BLOCK_N)
    num_shares = max(1, tl.cdiv(high - origin, share))  # the one of a tile that sees nothing writes zeros
    if split >= num_shares:
        return
    first, last = origin + split * share, min(high, origin + (split + 1) * share)

    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    num_rows = num_queries * GROUP
    query_row = query + (first_token + row // GROUP).to(tl.int64) * query_strides[0]
    query_row += (head * GROUP + row % GROUP) * query_strides[1]
    q = tl.load(
        query_row[:, None] + column[None, :] * query_strides[2],
        (row < num_rows)[:, None] & (column < HEAD_SIZE)[None, :],
        0.0,
    )
    slope = None
    if alibi_slopes is not None:
        slope = tl.load(alibi_slopes + head * GROUP + row % GROUP) * LOG2E
    if k_scale is not None:
        scale *= tl.load(k_scale)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    position = first_position + row // GROUP
    keys = cache + head.to(tl.int64) * cache_strides[1]
    pages = block_table + request.to(tl.int64) * table_strides[0]

    full_first, full_last = first, first  # the keys, in whole blocks, that every query of the tile sees
    if not ONE_PASS:
        if LEFT is not None:
            full_first = origin + tl.cdiv(max(0, last_position - LEFT - origin), BLOCK_N) * BLOCK_N
            full_first = min(max(first, full_first), last)
        full_last = high
        if RIGHT is not None:
            full_last = min(high, first_position + RIGHT + 1)
        full_last = origin + max(0, full_last - origin) // BLOCK_N * BLOCK_N
        full_last = max(full_first, min(full_last, last))
        acc, top, total = _attend(
            acc, top, total, q, position, slope, scale, soft_cap, keys, cache_strides, pages, table_strides[1],
            full_first, full_last, full_last, 0, low, last,
            False, LEFT, RIGHT, HEAD_SIZE, BLOCK_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    full = full_last - full_first
    acc, top, total = _attend(
        acc, top, total, q, position, slope, scale, soft_cap, keys, cache_strides, pages, table_strides[1],
        first, last - full, full_first, full, low, last,
        True, LEFT, RIGHT, HEAD_SIZE, BLOCK_SIZE, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    if SPLIT:
        item = tile * NUM_KV_HEADS + head
        if num_shares > 1:
            first_part = item.to(tl.int64) * num_splits
            place = (first_part + split) * BLOCK_M + row
            tl.store(partials + place[:, None] * BLOCK_D + column[None, :], acc, (row < num_rows)[:, None])
            tl.store(maxima + place * 2, top, row < num_rows)
            tl.store(maxima + place * 2 + 1, total, row < num_rows)
            tl.debug_barrier()  # what all threads have stored is there before the ticket that tells of it
            if tl.atomic_add(tickets + item, 1, sem="acq_rel") == num_shares - 1:
                tl.store(tickets + item, 0)
                _merge(
                    partials, maxima, first_part, num_shares, num_rows, out, out_strides, first_token, head, sinks,
                    v_scale, GROUP, HEAD_SIZE, BLOCK_M, BLOCK_D,
                )  # fmt: skip
            return
    _write(
        acc, top, total, row, num_rows, out, out_strides, first_token, head, sinks, v_scale, GROUP, HEAD_SIZE, BLOCK_D
    )


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


@triton.jit
def _attend(
    acc, top, total, q, position, slope, scale, soft_cap, keys, cache_strides, pages, page_stride,
    first, last, gap, gap_length, low, high,
    MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The online softmax over the keys first … last - 1, where those from `gap` on are gap_length further on. MASKED:
    whether some are below low, at high or beyond, or unseen by some query. acc: the values' weighted sum; top: the
    highest score; total: the sum of the weights.
    """
    column = tl.arange(0, BLOCK_D)
    for counted in range(first, last, BLOCK_N):
        start = counted
        if MASKED:
            start += tl.where(counted >= gap, gap_length, 0)
        key_position = start + tl.arange(0, BLOCK_N)
        inside = None
        if MASKED:
            inside = (key_position >= low) & (key_position < high)
        if BLOCK_SIZE % BLOCK_N == 0:  # the keys are all in one page
            page = tl.load(pages + start // BLOCK_SIZE * page_stride)
        elif MASKED:
            page = tl.load(pages + key_position // BLOCK_SIZE * page_stride, inside, 0)
        else:
            page = tl.load(pages + key_position // BLOCK_SIZE * page_stride)
        slot = page.to(tl.int64) * cache_strides[0] + key_position % BLOCK_SIZE * cache_strides[2]
        place = keys + slot[:, None] + column[None, :] * cache_strides[3]

        k = _load_rows(place, inside, column, HEAD_SIZE, BLOCK_D).to(q.dtype)
        score = tl.dot(q, k.T, input_precision="ieee")
        unit = scale * LOG2E
        if soft_cap is not None:  # with tanh as in _formulas
            score = (2 * tl.sigmoid(score * (2 * scale / soft_cap)) - 1) * (soft_cap * LOG2E)
            unit = 1.0
        if slope is not None:
            distance = key_position[None, :] - position[:, None]
            score = score * unit + slope[:, None] * distance
            unit = 1.0
        if MASKED:
            distance = key_position[None, :] - position[:, None]
            visible = inside[None, :]
            if LEFT is not None:
                visible = visible & (distance >= -LEFT)
            if RIGHT is not None:
                visible = visible & (distance <= RIGHT)
            score = tl.where(visible, score, float("-inf"))

        highest = tl.maximum(top, tl.max(score, 1) * unit)
        weight = tl.exp2(score * unit - highest[:, None])
        decay = tl.exp2(top - highest)
        total = total * decay + tl.sum(weight, 1)
        v = _load_rows(place + HEAD_SIZE * cache_strides[3], inside, column, HEAD_SIZE, BLOCK_D).to(q.dtype)
        acc = tl.dot(weight.to(q.dtype), v, acc * decay[:, None], input_precision="ieee")
        top = highest
    return acc, top, total


@triton.jit
def _load_rows(place, inside, column, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Keys or values. Zeros where they are not inside, which is not read, and beyond the head."""
    if inside is not None:
        mask = inside[:, None] & (column < HEAD_SIZE)[None, :] if BLOCK_D != HEAD_SIZE else inside[:, None]
        rows = tl.load(place, mask, 0.0)
    elif BLOCK_D != HEAD_SIZE:
        rows = tl.load(place, (column < HEAD_SIZE)[None, :], 0.0)
    else:
        rows = tl.load(place)
    return rows


@triton.jit
def _merge(
    partials, maxima, first_part, num_shares, num_rows, out, out_strides, first_token, head, sinks, v_scale,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds up what all programs of a tile have stored, in the order of the keys, and writes the result.

    Loads pass by the first-level cache (.cg), which other multiprocessors' stores do not reach.
    """
    column = tl.arange(0, BLOCK_D)
    share = tl.arange(0, MERGED_ELEMENTS // BLOCK_D)
    for first_row in range(0, num_rows, MERGED_ROWS):
        row = first_row + tl.arange(0, MERGED_ROWS)
        acc = tl.zeros((MERGED_ROWS, BLOCK_D), tl.float32)
        top = tl.full((MERGED_ROWS,), LOWEST, tl.float32)
        total = tl.zeros((MERGED_ROWS,), tl.float32)
        for first in range(0, num_shares, MERGED_ELEMENTS // BLOCK_D):
            exists = (first + share < num_shares)[:, None] & (row < num_rows)[None, :]
            place = (first_part + first + share)[:, None] * BLOCK_M + row[None, :]
            tops = tl.load(maxima + place * 2, exists, LOWEST, cache_modifier=".cg")
            totals = tl.load(maxima + place * 2 + 1, exists, 0.0, cache_modifier=".cg")
            accs = partials + place[:, :, None] * BLOCK_D + column[None, None, :]
            accs = tl.load(accs, exists[:, :, None], 0.0, cache_modifier=".cg")
            highest = tl.maximum(top, tl.max(tops, 0))
            weight, decay = tl.exp2(tops - highest[None, :]), tl.exp2(top - highest)
            total = total * decay + tl.sum(totals * weight, 0)
            acc = acc * decay[:, None] + tl.sum(accs * weight[:, :, None], 0)
            top = highest
        _write(
            acc, top, total, row, num_rows, out, out_strides, first_token, head, sinks, v_scale,
            GROUP, HEAD_SIZE, BLOCK_D,
        )  # fmt: skip


@triton.jit
def _write(
    acc, top, total, row, num_rows, out, out_strides, first_token, head, sinks, v_scale,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The rows' results: zeros for a query that has seen no key."""
    query_head = head * GROUP + row % GROUP
    if sinks is not None:
        sink = tl.load(sinks + query_head).to(tl.float32) * LOG2E
        highest = tl.maximum(top, sink)
        decay = tl.exp2(top - highest)
        acc, total = acc * decay[:, None], total * decay + tl.exp2(sink - highest)
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    if v_scale is not None:
        result *= tl.load(v_scale)
    column = tl.arange(0, BLOCK_D)
    place = out + (first_token + row // GROUP).to(tl.int64) * out_strides[0] + query_head * out_strides[1]
    mask = (row < num_rows)[:, None] & (column < HEAD_SIZE)[None, :]
    tl.store(place[:, None] + column[None, :] * out_strides[2], result.to(out.dtype.element_ty), mask)
