"""Device code of paged_attention that writes results: of a whole tile, or combined from partial results (split-KV)."""

import triton
import triton.language as tl

from vllm_opset.kernels.triton.paged_attention._tile import LOG2E, LOWEST, STATS

# Elements of partial results that are loaded at a time: 64 in the registers of each of 128 threads.
COMBINED_ELEMENTS = tl.constexpr(8192)


@triton.jit
def write(
    acc, m_i, l_i, row, num_rows, out, out_strides, first_token, head, sinks, v_scale,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes the results of these rows of a tile: zeros for a query without visible keys."""
    query_head = head * GROUP + row % GROUP
    if sinks is not None:
        sink = tl.load(sinks + query_head).to(tl.float32) * LOG2E
        m_new = tl.maximum(m_i, sink)
        alpha = tl.exp2(m_i - m_new)
        acc, l_i = acc * alpha[:, None], l_i * alpha + tl.exp2(sink - m_new)
    result = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]
    if v_scale is not None:
        result *= tl.load(v_scale)
    column = tl.arange(0, BLOCK_D)
    place = out + (first_token + row // GROUP).to(tl.int64) * out_strides[0] + query_head * out_strides[1]
    mask = (row < num_rows)[:, None] & (column < HEAD_SIZE)[None, :]
    tl.store(place[:, None] + column[None, :] * out_strides[2], result.to(out.dtype.element_ty), mask)


@triton.jit
def store_partial(
    acc, m_i, l_i, partials, stats, partial, num_rows, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Stores the partial result of a tile's rows, for `combine_rows`. partial: its index among all of a launch."""
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    place = partial.to(tl.int64) * BLOCK_M + row
    tl.store(partials + place[:, None] * BLOCK_D + column[None, :], acc, (row < num_rows)[:, None])
    tl.store(stats + place * STATS, m_i, row < num_rows)
    tl.store(stats + place * STATS + 1, l_i, row < num_rows)


@triton.jit
def is_last(ticket, num_partials):
    """Whether all other programs of a tile have stored their partial results. Leaves the ticket at zero."""
    tl.debug_barrier()  # all threads' stores come before the ticket
    last = tl.atomic_add(ticket, 1, sem="acq_rel") == num_partials - 1
    if last:
        tl.store(ticket, 0)
    return last


@triton.jit
def combine_rows(
    first_row, partials, stats, first_partial, num_partials, num_rows,
    out, out_strides, first_token, head, sinks, v_scale,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Combines the partial results of ROWS rows of a tile, from first_row on, in the order of the keys.

    They are contiguous from first_partial on. The loads bypass the L1 cache (.cg), because stores of other
    multiprocessors do not reach it.
    """
    AT_A_TIME: tl.constexpr = max(1, COMBINED_ELEMENTS // (ROWS * BLOCK_D))
    column, partial = tl.arange(0, BLOCK_D), tl.arange(0, AT_A_TIME)
    row = first_row + tl.arange(0, ROWS)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    m_i = tl.full((ROWS,), LOWEST, tl.float32)
    l_i = tl.zeros((ROWS,), tl.float32)
    for first in range(0, num_partials, AT_A_TIME):
        exists = (first + partial < num_partials)[:, None] & (row < num_rows)[None, :]
        place = (first_partial.to(tl.int64) + first + partial)[:, None] * BLOCK_M + row[None, :]
        m_parts = tl.load(stats + place * STATS, exists, LOWEST, cache_modifier=".cg")
        l_parts = tl.load(stats + place * STATS + 1, exists, 0.0, cache_modifier=".cg")
        accs = partials + place[:, :, None] * BLOCK_D + column[None, None, :]
        accs = tl.load(accs, exists[:, :, None], 0.0, cache_modifier=".cg")
        m_new = tl.maximum(m_i, tl.max(m_parts, 0))
        p, alpha = tl.exp2(m_parts - m_new[None, :]), tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(l_parts * p, 0)
        acc = acc * alpha[:, None] + tl.sum(accs * p[:, :, None], 0)
        m_i = m_new
    write(acc, m_i, l_i, row, num_rows, out, out_strides, first_token, head, sinks, v_scale, GROUP, HEAD_SIZE, BLOCK_D)
