"""The device code of paged_attention for results: of a tile, or of parts of its keys, which are added up."""

import triton
import triton.language as tl

from vllm_opset.kernels.triton.paged_attention._tile import LOG2E, LOWEST

MERGED_ROWS = tl.constexpr(4)  # rows that are merged together: those of a decoded token of most models
MERGED_ELEMENTS = tl.constexpr(2048)  # of a merged row's partial results that are in flight together


@triton.jit
def write(
    acc, top, total, row, num_rows, out, out_strides, first_token, head, sinks, v_scale,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The results of these rows of a tile: zeros for a query that has seen no key."""
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


@triton.jit
def store_part(
    acc, top, total, partials, maxima, part, num_rows, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """What a tile's rows have got of a part of its keys, for `merge_rows`. part: its place among all of a launch."""
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    place = part.to(tl.int64) * BLOCK_M + row
    tl.store(partials + place[:, None] * BLOCK_D + column[None, :], acc, (row < num_rows)[:, None])
    tl.store(maxima + place * 2, top, row < num_rows)
    tl.store(maxima + place * 2 + 1, total, row < num_rows)


@triton.jit
def is_last(ticket, num_parts):
    """Whether all other programs that attend a tile have stored their parts. Leaves the ticket at zero."""
    tl.debug_barrier()  # what all threads have stored is there before the ticket that tells of it
    last = tl.atomic_add(ticket, 1, sem="acq_rel") == num_parts - 1
    if last:
        tl.store(ticket, 0)
    return last


@triton.jit
def merge_rows(
    first_row, partials, maxima, first_part, num_parts, num_rows, out, out_strides, first_token, head, sinks, v_scale,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds up the parts of MERGED_ROWS rows of a tile, from first_row on, in the order of the keys, and writes them.

    The parts lie one after the other, from first_part on. Loads pass by the first-level cache (.cg), which other
    multiprocessors' stores do not reach.
    """
    column = tl.arange(0, BLOCK_D)
    part = tl.arange(0, MERGED_ELEMENTS // BLOCK_D)
    row = first_row + tl.arange(0, MERGED_ROWS)
    acc = tl.zeros((MERGED_ROWS, BLOCK_D), tl.float32)
    top = tl.full((MERGED_ROWS,), LOWEST, tl.float32)
    total = tl.zeros((MERGED_ROWS,), tl.float32)
    for first in range(0, num_parts, MERGED_ELEMENTS // BLOCK_D):
        exists = (first + part < num_parts)[:, None] & (row < num_rows)[None, :]
        place = (first_part.to(tl.int64) + first + part)[:, None] * BLOCK_M + row[None, :]
        tops = tl.load(maxima + place * 2, exists, LOWEST, cache_modifier=".cg")
        totals = tl.load(maxima + place * 2 + 1, exists, 0.0, cache_modifier=".cg")
        accs = partials + place[:, :, None] * BLOCK_D + column[None, None, :]
        accs = tl.load(accs, exists[:, :, None], 0.0, cache_modifier=".cg")
        highest = tl.maximum(top, tl.max(tops, 0))
        weight, decay = tl.exp2(tops - highest[None, :]), tl.exp2(top - highest)
        total = total * decay + tl.sum(totals * weight, 0)
        acc = acc * decay[:, None] + tl.sum(accs * weight[:, :, None], 0)
        top = highest
    write(
        acc, top, total, row, num_rows, out, out_strides, first_token, head, sinks, v_scale, GROUP, HEAD_SIZE, BLOCK_D
    )
