"""The device code of paged_attention for few queries: all programs of a KV head attend the same number of keys.

The keys of all requests, in blocks, stand in one row, which is cut into equal shares, wherever the cuts fall. So
lengths may be mixed as they like, and the number of programs does not depend on them.
"""

import triton
import triton.language as tl

from vllm_opset.kernels.triton._launch import begin
from vllm_opset.kernels.triton.paged_attention._tile import attend, load_queries, seen_by_all
from vllm_opset.kernels.triton.paged_attention.combine import MERGED_ROWS, is_last, merge_rows, store_part, write

REQUESTS = tl.constexpr(256)  # that are planned together
PROGRAMS = tl.constexpr(64)  # whose first requests are looked for together
# The blocks that a program attends in the time that merging one more part takes, measured on an H200: attending a share
# and merging all of a request take least together if a share is the square root of this times all its blocks.
MERGE_BLOCKS = tl.constexpr(0.125)
FULL_BLOCKS = tl.constexpr(8)  # that all queries see, from which on these are worth a loop of their own, without masks


@triton.jit(do_not_specialize=["num_reqs", "num_programs", "turn"])
def plan(
    query_start_loc, seq_lens, num_reqs, starts, first_requests, num_programs, turn,
    LEFT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program. starts: [num_reqs + 2], where the blocks of a request start in the row of all, the end of the row,
    and the blocks of a share. first_requests: [num_programs + 1], the request that the share of a program starts in.
    turn: the blocks that a program attends in the time that going on to another request takes; so many places in the
    row are left empty after each request.
    """
    total, longest = 0, 0
    tl.store(starts, 0)
    for first in range(0, num_reqs, REQUESTS):
        request = first + tl.arange(0, REQUESTS)
        exists = request < num_reqs
        first_token = tl.load(query_start_loc + request, exists, 0)
        query_len = tl.load(query_start_loc + request + 1, exists, 0) - first_token
        seq_len = tl.load(seq_lens + request, exists, 0)
        low = _low(seq_len - query_len, LEFT)
        blocks = tl.cdiv(seq_len - low // BLOCK_N * BLOCK_N, BLOCK_N)
        blocks = tl.where(query_len > 0, turn + tl.maximum(blocks, 1), 0)  # who sees no key must be told so
        tl.store(starts + 1 + request, total + tl.cumsum(blocks), exists)
        total += tl.sum(blocks)
        longest = max(longest, tl.max(blocks))
    tl.debug_barrier()  # what follows reads what other threads have written
    best = (tl.sqrt(longest.to(tl.float32) * MERGE_BLOCKS) + 0.5).to(tl.int32)
    share = max(1, max(tl.cdiv(total, num_programs), best))
    tl.store(starts + num_reqs + 1, share)
    for first_program in range(0, num_programs + 1, PROGRAMS):
        program = first_program + tl.arange(0, PROGRAMS)
        found = tl.zeros((PROGRAMS,), tl.int32)
        for first in range(0, num_reqs, REQUESTS):
            request = first + tl.arange(0, REQUESTS)
            end = tl.load(starts + 1 + request, request < num_reqs, 2**31 - 1)
            found += tl.sum((end[None, :] <= (program * share)[:, None]).to(tl.int32), 1)
        tl.store(first_requests + program, tl.minimum(found, num_reqs - 1), program <= num_programs)


@triton.jit
def _low(first_position, LEFT: tl.constexpr):
    """The first key that the queries from this position on see."""
    return first_position * 0 if LEFT is None else tl.maximum(0, first_position - LEFT)


@triton.jit(do_not_specialize=["num_reqs", "num_programs", "turn"])
def attend_few(
    query, query_strides, cache, cache_strides, out, out_strides,
    query_start_loc, seq_lens, block_table, table_strides, num_reqs,
    scale, soft_cap, alibi_slopes, sinks, k_scale, v_scale,
    partials, maxima, tickets, starts, first_requests, num_programs, turn,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program for each KV head and share, in this order. All queries of a request are one tile. tickets: None if
    its parts are left to merge_few, which merges all rows at once; the last of its programs would do a few at a time.

    What is read before `begin` is older than the kernel before this one: the plan, and what it was made of.
    """
    program = tl.program_id(0)
    head, program = program % NUM_KV_HEADS, program // NUM_KV_HEADS
    share = tl.load(starts + num_reqs + 1)
    first_request = tl.load(first_requests + program)
    num_requests = tl.load(first_requests + program + 1) - first_request + 1
    start, end, first_token, query_len, seq_len = _request(starts, turn, query_start_loc, seq_lens, first_request)
    keys = cache + head.to(tl.int64) * cache_strides[1]
    if OVERLAP:
        key = _low(seq_len - query_len, LEFT) + max(0, program * share - start) * BLOCK_N
        pages = block_table + first_request.to(tl.int64) * table_strides[0]
        _touch(pages + max(0, min(key, seq_len - 1)) // BLOCK_SIZE * table_strides[1])
    begin(OVERLAP)
    if k_scale is not None:
        scale *= tl.load(k_scale)
    for index in range(num_requests):
        request = first_request + index
        if index > 0:
            start, end, first_token, query_len, seq_len = _request(starts, turn, query_start_loc, seq_lens, request)
        first_block, last_block = max(start, program * share), min(end, (program + 1) * share)
        if first_block < last_block:
            first_position = seq_len - query_len
            low = _low(first_position, LEFT)
            origin = low // BLOCK_N * BLOCK_N
            first = origin + (first_block - start) * BLOCK_N
            last = min(seq_len, origin + (last_block - start) * BLOCK_N)
            full_first, full_last = seen_by_all(first, last, first_position, seq_len - 1, LEFT, RIGHT, BLOCK_N)
            if full_last - full_first < min(last - first, FULL_BLOCKS * BLOCK_N):
                full_first, full_last = first, first
            num_rows = query_len * GROUP
            q = load_queries(query, query_strides, first_token, head, num_rows, GROUP, HEAD_SIZE, BLOCK_M, BLOCK_D)
            acc, top, total = attend(
                q, head, first_position, scale, soft_cap, alibi_slopes,
                keys, cache_strides, block_table + request.to(tl.int64) * table_strides[0], table_strides[1],
                first, last, full_first, full_last, low,
                GROUP, LEFT, RIGHT, HEAD_SIZE, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            first_part, num_parts = _parts(start, end, share, request, head, num_reqs, num_programs)
            if num_parts == 1:
                row = tl.arange(0, BLOCK_M)
                write(
                    acc, top, total, row, num_rows, out, out_strides, first_token, head, sinks, v_scale,
                    GROUP, HEAD_SIZE, BLOCK_D,
                )  # fmt: skip
            else:
                part = first_part + program - start // share
                store_part(acc, top, total, partials, maxima, part, num_rows, BLOCK_M, BLOCK_D)
                if tickets is not None:
                    last_of_all = is_last(tickets + request * NUM_KV_HEADS + head, num_parts)
                    if last_of_all:
                        for first_row in range(0, num_rows, MERGED_ROWS):
                            merge_rows(
                                first_row, partials, maxima, first_part, num_parts, num_rows,
                                out, out_strides, first_token, head, sinks, v_scale,
                                GROUP, HEAD_SIZE, BLOCK_M, BLOCK_D,
                            )  # fmt: skip


@triton.jit(do_not_specialize=["num_reqs", "num_programs", "turn"])
def merge_few(
    out, out_strides, query_start_loc, seq_lens, num_reqs, sinks, v_scale,
    partials, maxima, starts, first_requests, num_programs, turn,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Adds up what attend_few has stored. One program for each KV head and border between two shares, in this order,
    and for each MERGED_ROWS rows: it merges the request that lies across the border, if it is the request's first one.
    """
    begin(OVERLAP)
    head, border = tl.program_id(0) % NUM_KV_HEADS, tl.program_id(0) // NUM_KV_HEADS + 1
    share = tl.load(starts + num_reqs + 1)
    request = tl.load(first_requests + border)
    start, end, first_token, query_len, _ = _request(starts, turn, query_start_loc, seq_lens, request)
    first_part, num_parts = _parts(start, end, share, request, head, num_reqs, num_programs)
    first_row, num_rows = tl.program_id(1) * MERGED_ROWS, query_len * GROUP
    if (num_parts > 1) & (start // share == border - 1) & (first_row < num_rows):
        merge_rows(
            first_row, partials, maxima, first_part, num_parts, num_rows,
            out, out_strides, first_token, head, sinks, v_scale, GROUP, HEAD_SIZE, BLOCK_M, BLOCK_D,
        )  # fmt: skip


@triton.jit
def _parts(start, end, share, request, head, num_reqs, num_programs):
    """The parts of a request: the place of the first one among all, and how many there are."""
    first_program = start // share
    first_part = head * (num_programs + num_reqs) + first_program + request
    return first_part, (end - 1) // share - first_program + 1


@triton.jit
def _request(starts, turn, query_start_loc, seq_lens, request):
    """Where its blocks start and end in the row of all, its first token, its queries and its keys."""
    start, end = tl.load(starts + request), tl.load(starts + request + 1) - turn
    first_token = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - first_token
    return start, end, first_token, query_len, tl.load(seq_lens + request)


@triton.jit
def _touch(place):
    """Brings what lies there to the second-level cache, so that loading it takes less long."""
    code: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(code, "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1)
