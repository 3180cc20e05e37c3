"""The plan of prefill_sm90, and the launches around it.

A tile with more blocks of keys than a split may have is attended in several splits of its keys. `plan_prefill`
estimates the time for several lengths of a split, takes the fastest, and lists the splits, which are items of the plan.
`combine_prefill_sm90` combines the partial results of split tiles.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton.paged_attention._call import WARPGROUP, Call, tickets
from vllm_opset.kernels.triton.paged_attention.combine import combine_rows
from vllm_opset.kernels.triton.paged_attention.prefill import queries_of
from vllm_opset.ops.attention.paged_batch import PagedBatch

TILES = tl.constexpr(256)  # planned at a time; any number is right
KINDS = tl.constexpr(4)  # of items: see _store_items
MARGIN = tl.constexpr(1.125)  # splits that save less time by the count were slower on an H200
ITEM_FIELDS, SPLIT_TILE_FIELDS = tl.constexpr(4), tl.constexpr(4)
COMBINED_ROWS = 4  # of a tile, that one turn of combine_prefill_sm90 combines
COMBINING_PROGRAMS = 8  # on a multiprocessor: those of 4 warps that run at a time


class Plan(NamedTuple):
    """int32 tensors on the device of the batch. An item is one split of one tile, for every KV head.

    sizes: [3], the blocks of a split, the number of items, and that of split tiles.

    items: [most_items, 4], the request, the tile's first query, the split, and the index of its partial result. The
    last one means nothing if the tile is not split.

    split_tiles: [most_partials, 4], the request, the tile's first query, its first partial result and their number.

    ticket: [1], counts the items that are drawn. Each layer of a step leaves it at zero for the next one.
    """

    sizes: torch.Tensor
    items: torch.Tensor
    split_tiles: torch.Tensor
    ticket: torch.Tensor


@triton.jit(do_not_specialize=["num_reqs", "num_tiles", "num_programs", "most_partials", "least_blocks"])
def plan_prefill(
    query_start_loc, seq_lens, num_reqs, num_tiles, tiles, sizes, items, split_tiles,
    num_programs, most_partials, least_blocks,
    NUM_KV_HEADS: tl.constexpr, QUERIES: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BOX_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SIZES: tl.constexpr,
    SPLIT_COST: tl.constexpr, COMBINE_COST: tl.constexpr,
):  # fmt: skip
    """Runs as one program. tiles: [3, num_tiles], blocks, request and first query of each tile, for its own use."""
    total, longest = _store_tiles(
        query_start_loc, seq_lens, num_reqs, num_tiles, tiles, QUERIES, LEFT, RIGHT, BOX_ROWS, BLOCK_N
    )
    tl.debug_barrier()  # the loops below read what other threads have stored
    split_blocks = _split_blocks(
        tiles, num_tiles, total, longest, num_programs, most_partials, least_blocks,
        NUM_KV_HEADS, SIZES, SPLIT_COST, COMBINE_COST,
    )  # fmt: skip
    num_items, num_split_tiles = 0, 0
    for kind in range(KINDS):  # long items come first, and short ones fill gaps
        num_items, num_split_tiles = _store_items(
            tiles, num_tiles, split_blocks, longest, items, num_items, split_tiles, kind
        )
    tl.store(sizes, split_blocks)
    tl.store(sizes + 1, num_items)
    tl.store(sizes + 2, num_split_tiles)


@triton.jit
def _store_tiles(
    query_start_loc, seq_lens, num_reqs, num_tiles, tiles,
    QUERIES: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BOX_ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Returns the blocks of all tiles and of the longest one. A tile without queries has none."""
    total, longest = 0, 1
    for first in range(0, num_tiles, TILES):
        tile = first + tl.arange(0, TILES)
        request = _requests_of(tile, query_start_loc, num_reqs, QUERIES)
        first_token, seq_len = tl.load(query_start_loc + request), tl.load(seq_lens + request)
        query_len = tl.load(query_start_loc + request + 1) - first_token
        first_query, num_queries = queries_of(tile, first_token, query_len, num_reqs, QUERIES)
        low, high = keys_of(seq_len - query_len + first_query, num_queries, seq_len, BOX_ROWS, LEFT, RIGHT)
        exists = (tile < num_tiles) & (num_queries > 0)
        blocks = tl.where(exists, tl.maximum(tl.cdiv(high - low, BLOCK_N), 1), 0)
        tl.store(tiles + tile, blocks, tile < num_tiles)
        tl.store(tiles + num_tiles + tile, request, tile < num_tiles)
        tl.store(tiles + 2 * num_tiles + tile, first_query, tile < num_tiles)
        total += tl.sum(blocks)
        longest = max(longest, tl.max(blocks))
    return total, longest


@triton.jit
def _split_blocks(
    tiles, num_tiles, total, longest, num_programs, most_partials, least_blocks,
    NUM_KV_HEADS: tl.constexpr, SIZES: tl.constexpr, SPLIT_COST: tl.constexpr, COMBINE_COST: tl.constexpr,
):  # fmt: skip
    """The blocks of a split: at least least_blocks, and so many that at most most_partials splits have partial results.

    To store and combine a partial result takes as long as attending SPLIT_COST blocks, and the second launch as long as
    COMBINE_COST blocks. SIZES: how many numbers are compared: the longest tile's, then 2, 1, 2/3, 1/2 … of the average
    of a program.
    """
    split_blocks, least_time = longest, float("inf")
    for size in range(SIZES):
        candidate = longest
        if size > 0:
            candidate = min(longest, max(least_blocks, tl.cdiv(2 * total * NUM_KV_HEADS, num_programs * size)))
        num_long, num_partials = 0, 0
        for first in range(0, num_tiles, TILES):
            tile = first + tl.arange(0, TILES)
            blocks = tl.load(tiles + tile, tile < num_tiles, 0)
            num_long += tl.sum((blocks + candidate // 4) // candidate)  # whole splits, or nearly
            num_partials += tl.sum(tl.where(blocks > candidate, tl.cdiv(blocks, candidate), 0))
        average = (total + num_partials * SPLIT_COST) * NUM_KV_HEADS / num_programs
        time = tl.maximum(average, tl.cdiv(num_long * NUM_KV_HEADS, num_programs) * candidate * 1.0)
        if num_partials > 0:
            time = (time + COMBINE_COST) * MARGIN
        better = (num_partials <= most_partials) & (time < least_time)
        split_blocks, least_time = tl.where(better, candidate, split_blocks), tl.where(better, time, least_time)
    return split_blocks


@triton.jit
def _store_items(tiles, num_tiles, split_blocks, longest, items, num_items, split_tiles, kind):
    """Stores the items of one kind, and the split tiles. Returns the number of items so far, and of split tiles.

    Items of kind 0 are whole splits. The rest of a tile has fewer blocks. More than half a split is of kind 1, more
    than a quarter of kind 2, and less of kind 3. If no tile is split, kind 0 takes in kind 1: items of a request follow
    each other then, and find its keys in the L2 cache.
    """
    num_partials, num_split_tiles = 0, 0
    for first in range(0, num_tiles, TILES):
        tile = first + tl.arange(0, TILES)
        blocks = tl.load(tiles + tile, tile < num_tiles, 0)
        request = tl.load(tiles + num_tiles + tile, tile < num_tiles, 0)
        first_query = tl.load(tiles + 2 * num_tiles + tile, tile < num_tiles, 0)
        is_split = (blocks > split_blocks).to(tl.int32)
        num_splits = is_split * tl.cdiv(blocks, split_blocks)
        partial = num_partials + tl.cumsum(num_splits) - num_splits

        whole, rest = blocks // split_blocks, blocks % split_blocks
        rest_kind = tl.where(rest * 4 > split_blocks, 2, 3)
        rest_kind = tl.where(rest * 2 > split_blocks, (split_blocks < longest).to(tl.int32), rest_kind)
        first_split = tl.where(kind == 0, 0, whole)
        number = ((rest > 0) & (rest_kind == kind)).to(tl.int32) + tl.where(kind == 0, whole, 0)
        item = num_items + tl.cumsum(number) - number
        for index in range(tl.max(number)):
            place, split = items + (item + index) * ITEM_FIELDS, first_split + index
            tl.store(place, request, index < number)
            tl.store(place + 1, first_query, index < number)
            tl.store(place + 2, split, index < number)
            tl.store(place + 3, partial + split, index < number)
        place = split_tiles + (num_split_tiles + tl.cumsum(is_split) - is_split) * SPLIT_TILE_FIELDS
        tl.store(place, request, is_split == 1)
        tl.store(place + 1, first_query, is_split == 1)
        tl.store(place + 2, partial, is_split == 1)
        tl.store(place + 3, num_splits, is_split == 1)
        num_items += tl.sum(number)
        num_partials += tl.sum(num_splits)
        num_split_tiles += tl.sum(is_split)
    return num_items, num_split_tiles


@triton.jit
def _requests_of(tile, query_start_loc, num_reqs, QUERIES: tl.constexpr):
    """The requests of tiles, numbered as in prefill._request_of, by bisection."""
    step = 1
    while step < num_reqs:
        step *= 2
    found = tile * 0
    while step > 0:
        further = found + step
        start = tl.load(query_start_loc + further, further < num_reqs, 0)
        found = tl.where((further < num_reqs) & (start // QUERIES <= tile - num_reqs), further, found)
        step //= 2
    return tl.where(tile < num_reqs, tile, found)


@triton.jit
def keys_of(
    first_position, num_queries, seq_len, BOX_ROWS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr
):  # fmt: skip
    """Some query of a tile sees the keys low … high - 1, and low is the first row of a box."""
    low, high = first_position * 0, seq_len
    if LEFT is not None:
        low = tl.maximum(first_position - LEFT, 0) // BOX_ROWS * BOX_ROWS
    if RIGHT is not None:
        high = tl.minimum(high, first_position + num_queries + RIGHT)
    return low, high


@triton.jit(do_not_specialize=["most_partials"])
def combine_prefill_sm90(
    out, out_strides, query_start_loc, sinks, v_scale, partials, stats, sizes, split_tiles, most_partials,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Any number of programs combines the partial results of attend_prefill_sm90, ROWS rows at a time.

    The loads before `pdl_wait` read the plan, which is older than the results. Programs without a turn end at once. The
    first one always waits, so that the launch never ends before attend_prefill_sm90, on which the next kernel relies.
    """
    TURNS: tl.constexpr = BLOCK_M // ROWS
    num_turns = tl.load(sizes + 2) * TURNS * NUM_KV_HEADS
    if tl.program_id(0) < max(1, num_turns):
        pdl_wait(PDL)
    for turn in range(tl.program_id(0), num_turns, tl.num_programs(0)):
        head, first_row = turn % NUM_KV_HEADS, turn // NUM_KV_HEADS % TURNS * ROWS
        place = split_tiles + turn // (NUM_KV_HEADS * TURNS) * SPLIT_TILE_FIELDS
        request, first_query = tl.load(place), tl.load(place + 1)
        first_token = tl.load(query_start_loc + request) + first_query
        num_queries = min(BLOCK_M // GROUP, tl.load(query_start_loc + request + 1) - first_token)
        if first_row < num_queries * GROUP:
            combine_rows(
                first_row, partials, stats, head * most_partials + tl.load(place + 2), tl.load(place + 3),
                num_queries * GROUP, out, out_strides, first_token, head, sinks, v_scale,
                GROUP, HEAD_SIZE, ROWS, BLOCK_M, BLOCK_D,
            )  # fmt: skip


def most_partials_of(call: Call, values: _launch.Parameters, queries: int) -> int:
    """The most splits, for each KV head, of tiles whose keys are split. queries: of a tile.

    0 if tiles see few keys, or if the plan would split none anyway. That spares the launch that combines nothing.
    """
    most = values["programs"] * _launch.multiprocessors(call.query.device) // call.num_kv_heads
    longest = call.span(queries)
    if longest <= values["unsplit_keys"] or _least_keys(call, queries) >= longest * most:
        return 0
    return most


def _least_keys(call: Call, queries: int) -> float:
    """The fewest keys that all tiles see together, whatever the lengths of the requests.

    A request has at least as many keys as queries, and requests of equal lengths see fewest. The first tile of a
    request sees the keys before its queries, and the last one also as many as these are. All others lie between. Only
    of a single request does the host know the keys before its queries. If max_seq_len is above its length, as in a
    graph, this number is too large. Then a tile may not be split that would have been, and results stay right.
    """
    num_tokens, longest = call.query.shape[0], call.span(queries)
    before = max(0, call.batch.max_seq_len - num_tokens) if call.num_reqs == 1 else 0
    last = before + num_tokens / call.num_reqs
    return num_tokens / queries * (min(longest, before) + min(longest, last)) / 2


def make_plan(
    batch: PagedBatch, num_tiles: int, queries: int, num_kv_heads: int, left: int | None, right: int | None,
    box_rows: int, block_n: int, most_partials: int, values: tuple[tuple[str, int], ...],
) -> Plan:  # fmt: skip
    """Launches `plan_prefill`. queries: of a tile. most_partials: see `most_partials_of`.

    Kernels read the plan before the preceding kernel has ended. That is right for the first of them as well, because
    the ticket is made after the plan: when that kernel begins, the plan has ended.
    """
    device, table = batch.seq_lens.device, dict(values)
    empty = functools.partial(torch.empty, dtype=torch.int32, device=device)
    most_items = num_tiles + most_partials
    made = (empty(3), empty(most_items, ITEM_FIELDS.value), empty(most_partials, SPLIT_TILE_FIELDS.value))
    _launch.launch(
        plan_prefill, (1,),
        batch.query_start_loc, batch.seq_lens, len(batch.seq_lens), num_tiles, empty(3, num_tiles), *made,
        _launch.multiprocessors(device), most_partials, max(1, table["split_keys"] // block_n),
        NUM_KV_HEADS=num_kv_heads, QUERIES=queries, LEFT=left, RIGHT=right, BOX_ROWS=box_rows, BLOCK_N=block_n,
        SIZES=1 + 2 * table["programs"], SPLIT_COST=table["split_cost"], COMBINE_COST=table["combine_cost"],
        num_warps=WARPGROUP, **_launch.FUSION,
    )  # fmt: skip
    return Plan(*made, tickets(batch, 1))


def launch_combine(call: Call, made: Plan, partials: tuple, most_partials: int, rows: int) -> None:
    """Combines the partial results of tiles of so many rows."""
    device = call.query.device
    programs = COMBINING_PROGRAMS * _launch.multiprocessors(device)
    _launch.launch(
        combine_prefill_sm90, (programs,),
        call.out, call.out.stride(), call.batch.query_start_loc, call.sinks, call.v_scale, *partials, made.sizes,
        made.split_tiles, most_partials,
        NUM_KV_HEADS=call.num_kv_heads, GROUP=call.group, HEAD_SIZE=call.head_size, ROWS=COMBINED_ROWS, BLOCK_M=rows,
        BLOCK_D=call.block_d, num_warps=WARPGROUP, **_launch.launch_options(device),
    )  # fmt: skip
