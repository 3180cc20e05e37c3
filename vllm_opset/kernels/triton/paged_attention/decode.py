"""The kernels of paged_attention for few queries per request: decode, and verify (drafted tokens, ends of prompts).

`plan` puts the key blocks of all requests into one sequence and cuts it into ranges of equal length, one for each
program. A range may begin in one request and end in another. So every program of a KV head attends the same number of
blocks, however much the lengths of the requests differ (stream-K, split-KV). If there are enough programs, no range
spans two requests. `attend_decode` attends the ranges. A request that spans several programs leaves a partial result of
each, and the last of these programs combines them, or `combine_verify` does.
"""

import torch
import triton
import triton.language as tl

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton.paged_attention import _call
from vllm_opset.kernels.triton.paged_attention._call import (
    MAX_ROWS_FP32,
    MIN_ROWS,
    WARPGROUP,
    Call,
    thresholds,
    tile_rows,
)
from vllm_opset.kernels.triton.paged_attention._tile import attend, load_queries, seen_by_all
from vllm_opset.kernels.triton.paged_attention.combine import combine_rows, is_last, store_partial, write
from vllm_opset.ops.attention.paged_batch import PagedBatch

# Requests that are planned at a time, and programs whose first requests are searched at a time. Any numbers are right.
REQUESTS, PROGRAMS = tl.constexpr(256), tl.constexpr(64)
RANGE_FIELDS = tl.constexpr(8)  # 32 bytes, which one access of DRAM brings
# The columns of tiles for which the launch table has parameters with an fp8 cache.
LEAST_FP8_WIDTH, MOST_FP8_WIDTH = 64, 256


@triton.jit(do_not_specialize=["num_reqs", "num_programs", "switch_cost", "whole_cost"])
def plan(
    query_start_loc, seq_lens, num_reqs, starts, ends, ranges, num_programs, switch_cost, whole_cost,
    LEFT: tl.constexpr, BLOCK_N: tl.constexpr, COMBINE_COST: tl.constexpr,
):  # fmt: skip
    """Runs as one program.

    starts: [num_reqs + 1], the first place of each request in the sequence, and the end of the sequence.
    ends: [num_reqs + 1], the end of each request's blocks, and the places of a program.
    ranges: [num_programs, 8], the request in which each program begins, and the number of requests up to that in which
    it ends. Then come the results of `_request` for the first of them, and the places of a program. So a program knows
    its first keys after one load, and not after a second one that depends on it.

    switch_cost: to go on to another request takes a program as long as attending this many blocks. As many places stay
    empty after each request. COMBINE_COST: to combine one more partial result takes as long as attending this many
    blocks. To attend b of n blocks and to combine n / b partial results takes least time where b = √(n · COMBINE_COST).

    whole_cost: a program that attends this many blocks more, but of one request alone, takes as long. If there are
    programs enough, the places after each request stay empty up to the next program's first one.

    For example, requests a, b and c have 9, 1 and 2 blocks, 4 programs share them, switch_cost is 1, and whole_cost 0:

        place     0   4   8   12
        request   aaaaaaaaa-b-cc--
        program   0000111122223333

    starts is [0, 10, 12, 15], and ends is [9, 11, 14, 4]. Program 2 attends the last block of a, and b. Programs 0, 1
    and 2 each leave a partial result of a.
    """
    num_places, longest = 0, 0
    for first in range(0, num_reqs, REQUESTS):
        blocks = _blocks(query_start_loc, seq_lens, first, num_reqs, LEFT, BLOCK_N)
        num_places += tl.sum(tl.where(blocks > 0, switch_cost + blocks, 0))
        longest = max(longest, tl.max(blocks))
    best = (tl.sqrt(longest.to(tl.float32) * COMBINE_COST) + 0.5).to(tl.int32)
    in_turn = max(1, max(tl.cdiv(num_places, num_programs), best))
    least, most = max(1, best), longest + 1  # of blocks per program of one request alone; `most` is one too many
    while least < most:
        middle = (least + most) // 2
        needed = 0
        for first in range(0, num_reqs, REQUESTS):
            blocks = _blocks(query_start_loc, seq_lens, first, num_reqs, LEFT, BLOCK_N)
            needed += tl.sum(tl.cdiv(blocks, middle))
        enough = needed <= num_programs
        least, most = tl.where(enough, least, middle + 1), tl.where(enough, middle, most)
    whole = (least <= longest) & (least <= in_turn + whole_cost)
    blocks_per_program = tl.where(whole, least, in_turn)
    tl.store(ends + num_reqs, blocks_per_program)
    tl.store(starts, 0)
    end = 0
    for first in range(0, num_reqs, REQUESTS):
        request = first + tl.arange(0, REQUESTS)
        blocks = _blocks(query_start_loc, seq_lens, first, num_reqs, LEFT, BLOCK_N)
        places = tl.where(whole, tl.cdiv(blocks, blocks_per_program) * blocks_per_program, switch_cost + blocks)
        places = tl.where(blocks > 0, places, 0)
        place_ends = end + tl.cumsum(places)
        tl.store(starts + 1 + request, place_ends, request < num_reqs)
        tl.store(ends + request, place_ends - places + blocks, request < num_reqs)
        end += tl.sum(places)
    tl.debug_barrier()  # the loop below reads what other threads have stored
    for first_program in range(0, num_programs, PROGRAMS):
        program = first_program + tl.arange(0, PROGRAMS)
        before_first, before_last = tl.zeros((PROGRAMS,), tl.int32), tl.zeros((PROGRAMS,), tl.int32)
        for first in range(0, num_reqs, REQUESTS):
            request = first + tl.arange(0, REQUESTS)
            place_ends = tl.load(starts + 1 + request, request < num_reqs, 2**31 - 1)[None, :]
            before_first += tl.sum((place_ends <= (program * blocks_per_program)[:, None]).to(tl.int32), 1)
            before_last += tl.sum((place_ends < ((program + 1) * blocks_per_program)[:, None]).to(tl.int32), 1)
        first_request, last_request = tl.minimum(before_first, num_reqs - 1), tl.minimum(before_last, num_reqs - 1)
        facts = _request(starts, ends, query_start_loc, seq_lens, first_request)
        place, exists = ranges + program * RANGE_FIELDS, program < num_programs
        tl.store(place, first_request, exists)
        tl.store(place + 1, last_request - first_request + 1, exists)
        for field in tl.static_range(5):
            tl.store(place + 2 + field, facts[field], exists)
        tl.store(place + 7, blocks_per_program, exists)


@triton.jit
def _blocks(query_start_loc, seq_lens, first, num_reqs, LEFT: tl.constexpr, BLOCK_N: tl.constexpr):
    """The blocks of these requests: none without queries, and one without keys, since the query still gets zeros."""
    request = first + tl.arange(0, REQUESTS)
    exists = request < num_reqs
    query_len = tl.load(query_start_loc + request + 1, exists, 0) - tl.load(query_start_loc + request, exists, 0)
    seq_len = tl.load(seq_lens + request, exists, 0)
    blocks = tl.cdiv(seq_len - _low(seq_len - query_len, LEFT) // BLOCK_N * BLOCK_N, BLOCK_N)
    return tl.where(query_len > 0, tl.maximum(blocks, 1), 0)


@triton.jit
def _low(first_position, LEFT: tl.constexpr):
    """The first key that is visible to queries from this position on."""
    return first_position * 0 if LEFT is None else tl.maximum(0, first_position - LEFT)


@triton.jit(do_not_specialize=["num_reqs", "num_programs"])
def attend_decode(
    query, query_strides, cache, cache_strides, out, out_strides,
    query_start_loc, seq_lens, block_table, table_strides, num_reqs,
    scale, soft_cap, alibi_slopes, sinks, k_scale, v_scale,
    partials, stats, tickets, starts, ends, ranges, num_programs,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, UNMASKED_BLOCKS: tl.constexpr, OWN_TURN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Launches one program for each KV head and range of blocks; the KV head varies fastest.

    All queries of a request are one tile. tickets: counts the partial results of a request that are stored; None if
    combine_verify combines them, which takes all rows at a time where the last program would take a few.

    UNMASKED_BLOCKS: the fewest blocks visible to all queries for which a loop without masks is worth its start.

    The loads before `pdl_wait` read the plan and its inputs. These are older than the preceding kernel.
    """
    program = tl.program_id(0)
    head, program = program % NUM_KV_HEADS, program // NUM_KV_HEADS
    place = ranges + program * RANGE_FIELDS
    first_request, num_requests, start, end = tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)
    first_token, query_len, seq_len = tl.load(place + 4), tl.load(place + 5), tl.load(place + 6)
    blocks_per_program = tl.load(place + 7)
    keys = cache + head.to(tl.int64) * cache_strides[1]
    if PDL:
        key = _low(seq_len - query_len, LEFT) + max(0, program * blocks_per_program - start) * BLOCK_N
        pages = block_table + first_request.to(tl.int64) * table_strides[0]
        _prefetch_l2(pages + max(0, min(key, seq_len - 1)) // BLOCK_SIZE * table_strides[1])
    pdl_wait(PDL)
    if k_scale is not None:
        scale *= tl.load(k_scale)
    for index in range(num_requests):
        request = first_request + index
        if index > 0:
            start, end, first_token, query_len, seq_len = _request(starts, ends, query_start_loc, seq_lens, request)
        first_block, last_block = max(start, program * blocks_per_program), min(end, (program + 1) * blocks_per_program)
        if first_block < last_block:
            first_position = seq_len - query_len
            low = _low(first_position, LEFT)
            origin = low // BLOCK_N * BLOCK_N
            first = origin + (first_block - start) * BLOCK_N
            last = min(seq_len, origin + (last_block - start) * BLOCK_N)
            full_first, full_last = seen_by_all(first, last, first_position, seq_len - 1, LEFT, RIGHT, BLOCK_N)
            if full_last - full_first < min(last - first, UNMASKED_BLOCKS * BLOCK_N):
                full_first, full_last = first, first
            num_rows = query_len * GROUP
            q = load_queries(query, query_strides, first_token, head, num_rows, GROUP, HEAD_SIZE, BLOCK_M, BLOCK_D)
            acc, m_i, l_i = attend(
                q, head, first_position, scale, soft_cap, alibi_slopes,
                keys, cache_strides, block_table + request.to(tl.int64) * table_strides[0], table_strides[1],
                first, last, full_first, full_last, low,
                GROUP, LEFT, RIGHT, HEAD_SIZE, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            first_partial, num_partials = _partials(
                start, end, blocks_per_program, request, head, num_reqs, num_programs
            )
            if num_partials == 1:
                row = tl.arange(0, BLOCK_M)
                write(
                    acc, m_i, l_i, row, num_rows, out, out_strides, first_token, head, sinks, v_scale,
                    GROUP, HEAD_SIZE, BLOCK_D,
                )  # fmt: skip
            else:
                partial = first_partial + program - start // blocks_per_program
                store_partial(acc, m_i, l_i, partials, stats, partial, num_rows, BLOCK_M, BLOCK_D)
                if tickets is not None:
                    last_of_all = is_last(tickets + request * NUM_KV_HEADS + head, num_partials)
                    if last_of_all:
                        for first_row in range(0, num_rows, OWN_TURN):
                            combine_rows(
                                first_row, partials, stats, first_partial, num_partials, num_rows,
                                out, out_strides, first_token, head, sinks, v_scale,
                                GROUP, HEAD_SIZE, OWN_TURN, BLOCK_M, BLOCK_D,
                            )  # fmt: skip


@triton.jit(do_not_specialize=["num_reqs", "num_programs"])
def combine_verify(
    out, out_strides, query_start_loc, seq_lens, num_reqs, sinks, v_scale,
    partials, stats, starts, ends, ranges, num_programs,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, COMBINED_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combines the partial results of attend_decode.

    Launches one program for every COMBINED_ROWS rows of each KV head (which varies fastest) and request, or border
    between two ranges, whichever are fewer. At a border, it combines the request that spans it, if this is the
    request's first border.

    The loads before `pdl_wait` read the plan and its inputs, which are older than attend_decode.
    """
    head, index = tl.program_id(0) % NUM_KV_HEADS, tl.program_id(0) // NUM_KV_HEADS
    blocks_per_program = tl.load(ends + num_reqs)
    by_request = num_reqs < num_programs
    request = index
    if not by_request:
        request = tl.load(ranges + (index + 1) * RANGE_FIELDS)
    start, end, first_token, query_len, _ = _request(starts, ends, query_start_loc, seq_lens, request)
    first_partial, num_partials = _partials(start, end, blocks_per_program, request, head, num_reqs, num_programs)
    first_row, num_rows = tl.program_id(1) * COMBINED_ROWS, query_len * GROUP
    pdl_wait(PDL)
    first_border = by_request | (start // blocks_per_program == index)
    if (num_partials > 1) & first_border & (first_row < num_rows):
        combine_rows(
            first_row, partials, stats, first_partial, num_partials, num_rows,
            out, out_strides, first_token, head, sinks, v_scale, GROUP, HEAD_SIZE, COMBINED_ROWS, BLOCK_M, BLOCK_D,
        )  # fmt: skip


@triton.jit
def _partials(start, end, blocks_per_program, request, head, num_reqs, num_programs):
    """The index of a request's first partial result, and how many it has."""
    first_program = start // blocks_per_program
    first_partial = head * (num_programs + num_reqs) + first_program + request
    return first_partial, (end - 1) // blocks_per_program - first_program + 1


@triton.jit
def _request(starts, ends, query_start_loc, seq_lens, request):
    """A request's first block and end in the sequence, its first token, its number of queries, and of keys."""
    start, end = tl.load(starts + request), tl.load(ends + request)
    first_token = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - first_token
    return start, end, first_token, query_len, tl.load(seq_lens + request)


@triton.jit
def _prefetch_l2(place):
    """Prefetches an address into the L2 cache."""
    code: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(code, "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1)


def can_decode(call: Call) -> bool:
    """Whether a tile of the fewest rows holds all queries of any request: those of one token, in most models."""
    return tile_rows(call.most_rows, call.group, call.query.dtype) == MIN_ROWS


def can_verify(call: Call) -> bool:
    """Whether one tile holds all queries of any request."""
    if call.query.dtype == torch.float32:
        return call.most_rows <= MAX_ROWS_FP32
    return call.most_rows <= thresholds(call.query.device)["verify_rows"]


def launch_decode(call: Call) -> None:
    _launch_ranges(call, launch_of_decode(call.block_d, call.caches_fp8))


def launch_of_decode(block_d: int, caches_fp8: bool) -> str:
    """The name of decode's launch parameters. An fp8 cache has its own for each width of a tile."""
    if not caches_fp8:
        return "paged_attention_decode"
    return f"fp8_{min(max(block_d, LEAST_FP8_WIDTH), MOST_FP8_WIDTH)}_paged_attention_decode"


def launch_verify(call: Call) -> None:
    _launch_ranges(call, "paged_attention_verify")


def _launch_ranges(call: Call, launch: str) -> None:
    """One launch if the last program of a request combines its few rows, else another one to combine them."""
    device, num_kv_heads, block_d = call.query.device, call.num_kv_heads, call.block_d
    values = _launch.parameters(launch, device, call.num_reqs * num_kv_heads)
    rows = tile_rows(call.most_rows, call.group, call.query.dtype)
    table = thresholds(device)
    warps = _warps(call, values) * max(1, rows * block_d // table["decode_elements"])
    block_n = call.block_n(values)
    num_programs = max(1, values["programs"] * _launch.multiprocessors(device) // num_kv_heads)
    tickets, starts, ends, ranges = call.batch.once(
        _plan, num_kv_heads, num_programs, values["switch_cost"], values["whole_cost"], table["combine_cost"],
        call.left, block_n,
    )  # fmt: skip
    partials = call.batch.once(_call.workspace, (num_programs + call.num_reqs) * num_kv_heads, rows, block_d)
    own_turn, combined_rows = None, values["combined_rows"]
    separate_combine = call.most_rows > values["own_rows"]
    if not separate_combine:
        own_turn = min(values["own_turn"], _launch.next_power_of_2(max(1, call.most_rows)))
    shape = {
        "NUM_KV_HEADS": num_kv_heads, "GROUP": call.group, "HEAD_SIZE": call.head_size, "BLOCK_M": rows,
        "BLOCK_D": block_d, **_launch.launch_options(device),
    }  # fmt: skip
    _launch.launch(
        attend_decode, (num_programs * num_kv_heads,),
        *call.attend_arguments(), *partials, None if separate_combine else tickets,
        starts, ends, ranges, num_programs,
        BLOCK_SIZE=call.block_size, LEFT=call.left, RIGHT=call.right, UNMASKED_BLOCKS=table["unmasked_blocks"],
        OWN_TURN=own_turn, BLOCK_N=block_n, num_warps=warps,
        num_stages=values["stages"], **shape,
    )  # fmt: skip
    if separate_combine and num_programs > 1:
        places = min(call.num_reqs, num_programs - 1) * num_kv_heads
        _launch.launch(
            combine_verify, (places, _launch.cdiv(call.most_rows, combined_rows)),
            *call.combine_arguments(), *partials, starts, ends, ranges, num_programs,
            COMBINED_ROWS=combined_rows, num_warps=WARPGROUP, **shape,
        )  # fmt: skip


def _warps(call: Call, values: _launch.Parameters) -> int:
    """Fewer where programs attend few keys, and barriers take most of the time. An fp8 cache has no such entries."""
    num_programs = values["programs"] * _launch.multiprocessors(call.query.device)
    keys = call.num_reqs * call.num_kv_heads * call.span(call.batch.max_query_len) / num_programs
    short = "short_keys" in values and keys <= values["short_keys"]
    return values["short_warps"] if short else values["warps"]


def _plan(
    batch: PagedBatch,
    num_kv_heads: int,
    num_programs: int,
    switch_cost: int,
    whole_cost: int,
    combine_cost: float,
    left: int | None,
    block_n: int,
) -> tuple[torch.Tensor, ...]:
    """Tickets, and the range of each program, for all layers with this window.

    Kernels read the plan before the preceding kernel has ended. That is right for the first of them as well, because
    the tickets are made after the plan, whether or not they are used: when that kernel begins, the plan has ended.
    """
    num_reqs, device = len(batch.seq_lens), batch.seq_lens.device
    starts, ends = (torch.empty(num_reqs + 1, dtype=torch.int32, device=device) for _ in range(2))
    ranges = torch.empty(num_programs, RANGE_FIELDS.value, dtype=torch.int32, device=device)
    _launch.launch(
        plan, (1,),
        batch.query_start_loc, batch.seq_lens, num_reqs, starts, ends, ranges, num_programs, switch_cost, whole_cost,
        LEFT=left, BLOCK_N=block_n, COMBINE_COST=combine_cost, **_launch.FUSION,
    )  # fmt: skip
    return _call.tickets(batch, num_reqs * num_kv_heads), starts, ends, ranges
