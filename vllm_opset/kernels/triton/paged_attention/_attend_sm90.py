"""The attending warpgroups of prefill_sm90: the online softmax of their rows of a tile, by wgmma."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from vllm_opset.kernels.triton.paged_attention._load_sm90 import (
    TILE_SLOTS,
    WARPGROUP_ROWS,
    await_tile,
    blocks,
    read_tile,
    rows_of_tile,
    start_of,
    steps_of,
)  # fmt: skip
from vllm_opset.kernels.triton.paged_attention._queries_sm90 import as_scores, coalesced, in_two_fp8
from vllm_opset.kernels.triton.paged_attention._tile import FP16_PEAK, LOG2E, LOWEST, STATS, is_visible

WGMMA_BITS = gl.constexpr(256)  # of each row, which an instruction multiplies
CLEARING_WARPGROUPS = gl.constexpr(2)  # the first ones of a program
MOST_PREFETCHED_D = gl.constexpr(128)  # at most: larger queries do not fit in registers beside a tile's results


@gluon.jit
def attend_tiles(
    WARPGROUP_INDEX: gl.constexpr, attended,
    BOX_ROWS: gl.constexpr, GROUP: gl.constexpr, HEAD_SIZE: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """The rows of one warpgroup in each tile that is published, up to one without queries."""
    tensors, queries, results, ring, scheduler, scales, split_blocks = attended
    PARTS: gl.constexpr = queries.shape[0] // results.shape[0]
    q = ()
    for part in gl.static_range(PARTS):
        q += (queries.index(WARPGROUP_INDEX * PARTS + part),)
    scale, soft_cap, k_scale, v_scale = scales
    if k_scale is not None:
        scale *= gl.load(k_scale)
    if v_scale is not None:
        v_scale = gl.load(v_scale)
    scales = (scale, soft_cap, v_scale)
    _, _, empty_tiles = scheduler
    taken, done, num_cleared = 0, 0, 0  # counts of tiles, of key blocks, and of cleared blocks
    num_queries, rows = _queries(WARPGROUP_INDEX, tensors, scheduler, taken, PARTS, GROUP, HEAD_SIZE, BLOCK_D)
    while num_queries > 0:
        first_token, first_position = read_tile(scheduler, taken, 1), read_tile(scheduler, taken, 2)
        seq_len, head = read_tile(scheduler, taken, 3), read_tile(scheduler, taken, 4)
        split, partial = read_tile(scheduler, taken, 6), read_tile(scheduler, taken, 7)
        mbarrier.arrive(empty_tiles.index(taken % TILE_SLOTS))
        if WARPGROUP_INDEX == 0 or num_queries * GROUP > WARPGROUP_INDEX * WARPGROUP_ROWS:
            done, num_cleared, num_queries, rows = _attend_tile(
                WARPGROUP_INDEX, tensors, rows, q, results.index(WARPGROUP_INDEX), ring, scheduler, taken, done,
                num_cleared, num_queries, first_token, first_position, seq_len, head, split, partial, scales,
                split_blocks, BOX_ROWS, GROUP, HEAD_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        else:
            done, num_cleared = _skip_tile(
                WARPGROUP_INDEX, ring, done, num_cleared, num_queries, first_position, seq_len, split, split_blocks,
                BOX_ROWS, LEFT, RIGHT, BLOCK_N,
            )  # fmt: skip
            num_queries, rows = _queries(
                WARPGROUP_INDEX, tensors, scheduler, taken + 1, PARTS, GROUP, HEAD_SIZE, BLOCK_D
            )
        taken += 1


@gluon.jit
def _queries(
    WARPGROUP_INDEX: gl.constexpr, tensors, scheduler, taken,
    PARTS: gl.constexpr, GROUP: gl.constexpr, HEAD_SIZE: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """Waits for a tile. Returns the number of its queries, and this warpgroup's rows of them."""
    ROW_LAYOUT: gl.constexpr = coalesced(BLOCK_D) if PARTS == 1 else as_scores(BLOCK_D)
    query, query_strides, _, _, _, _, _ = tensors
    num_queries = await_tile(scheduler, taken)
    first_token, head = read_tile(scheduler, taken, 1), read_tile(scheduler, taken, 4)
    row = WARPGROUP_INDEX * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, ROW_LAYOUT))
    column = gl.arange(0, BLOCK_D, gl.SliceLayout(0, ROW_LAYOUT))
    inside = (row < num_queries * GROUP)[:, None] & (column < HEAD_SIZE)[None, :]
    token, query_head = (first_token + row // GROUP).to(gl.int64), head * GROUP + row % GROUP
    place = gl.multiple_of(query + token * query_strides[0] + query_head * query_strides[1], 16)
    return num_queries, gl.load(place[:, None] + column[None, :], inside, 0.0)


@gluon.jit
def _attend_tile(
    WARPGROUP_INDEX: gl.constexpr, tensors, rows, q, result, ring, scheduler, taken, done, num_cleared,
    num_queries, first_token, first_position, seq_len, head, split, partial, scales, split_blocks,
    BOX_ROWS: gl.constexpr, GROUP: gl.constexpr, HEAD_SIZE: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """The online softmax of a warpgroup's rows of a tile over a split, and its result, or partial result.

    rows: the queries. q: shared memory for them: one matrix, or two for keys in fp8, whose sum they are. result: the
    same memory, in the dtype of results. Returns the counts so far, and what _queries returns for the next tile, whose
    queries arrive while the last values are added.
    """
    WIDTH: gl.constexpr = WGMMA_BITS // q[0].dtype.primitive_bitwidth
    SCORE_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, WIDTH])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    ROW_LAYOUT: gl.constexpr = coalesced(BLOCK_D) if len(q) == 1 else as_scores(BLOCK_D)
    _, _, out, out_strides, sinks, partials, stats = tensors
    _, values, _, empty_keys, full_values, empty_values, cleared = ring
    STAGES: gl.constexpr = values.shape[0]
    low, _, num_blocks, num_right, num_masked = blocks(
        first_position, num_queries, seq_len, BOX_ROWS, LEFT, RIGHT, BLOCK_N
    )
    first, last = steps_of(split, split_blocks, num_blocks)
    before = done - first  # the count of blocks, less the steps of this tile
    row = WARPGROUP_INDEX * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, ROW_LAYOUT))
    column = gl.arange(0, BLOCK_D, gl.SliceLayout(0, ROW_LAYOUT))
    inside = (row < num_queries * GROUP)[:, None] & (column < HEAD_SIZE)[None, :]
    token, query_head = (first_token + row // GROUP).to(gl.int64), head * GROUP + row % GROUP
    scale, soft_cap, v_scale = scales
    if len(q) == 1:
        q[0].store(rows)
    else:
        high, rest, row_scale = in_two_fp8(rows)
        q[0].store(high)
        q[1].store(rest)
        scale *= gl.convert_layout(row_scale, gl.SliceLayout(1, SCORE_LAYOUT), assert_trivial=True)
    hopper.fence_async_shared()

    row = WARPGROUP_INDEX * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, SCORE_LAYOUT))
    position = first_position + row // GROUP
    scale_log2, scale_of_tanh = scale * LOG2E, None
    if soft_cap is not None:
        scale_log2, scale_of_tanh = soft_cap * LOG2E, scale / soft_cap
    scales = (scale_log2, scale_of_tanh)
    acc = gl.zeros([WARPGROUP_ROWS, BLOCK_D], gl.float32, ACC_LAYOUT)
    m_i = gl.full([WARPGROUP_ROWS], LOWEST, gl.float32, gl.SliceLayout(1, SCORE_LAYOUT))
    l_i = gl.zeros([WARPGROUP_ROWS], gl.float32, gl.SliceLayout(1, SCORE_LAYOUT))

    score = hopper.warpgroup_mma_wait(0, deps=(_score(q, ring, done, BLOCK_N, SCORE_LAYOUT),))
    mbarrier.arrive(empty_keys.index(done % STAGES))
    start = start_of(first, low, num_blocks, num_right, BLOCK_N)
    p, m_i, l_i, _ = _softmax(
        score, m_i, l_i, scales, start, position, seq_len, True, LEFT, RIGHT, BLOCK_N, SCORE_LAYOUT, ACC_LAYOUT,
        values.dtype,
    )  # fmt: skip
    mbarrier.wait(full_values.index(done % STAGES), done // STAGES & 1)
    if start + BLOCK_N > seq_len:
        _clear(WARPGROUP_INDEX, values.index(done % STAGES), seq_len - start, cleared, num_cleared)
        num_cleared += 1
    for step in range(first + 1, min(num_masked, last)):
        acc, p, m_i, l_i = _step(
            acc, p, m_i, l_i, before + step, q, ring, scales, start_of(step, low, num_blocks, num_right, BLOCK_N),
            position, seq_len, True, LEFT, RIGHT, BLOCK_N, SCORE_LAYOUT, ACC_LAYOUT,
        )  # fmt: skip
    for step in range(max(num_masked, first + 1), last):
        acc, p, m_i, l_i = _step(
            acc, p, m_i, l_i, before + step, q, ring, scales, start_of(step, low, num_blocks, num_right, BLOCK_N),
            position, seq_len, False, LEFT, RIGHT, BLOCK_N, SCORE_LAYOUT, ACC_LAYOUT,
        )  # fmt: skip
    done = before + last
    acc = _add(acc, p, ring, done - 1)
    if BLOCK_D <= MOST_PREFETCHED_D:
        following = _queries(WARPGROUP_INDEX, tensors, scheduler, taken + 1, len(q), GROUP, HEAD_SIZE, BLOCK_D)
    acc, _ = hopper.warpgroup_mma_wait(0, deps=(acc, p))
    mbarrier.arrive(empty_values.index((done - 1) % STAGES))

    stored = False
    if partials is not None:
        stored = num_blocks > split_blocks
        if stored:
            _store_partial(acc, m_i, l_i, partials, stats, partial, row, num_queries * GROUP, WARPGROUP_INDEX, BLOCK_D)
    if not stored:
        if sinks is not None:
            sink = gl.load(sinks + head * GROUP + row % GROUP).to(gl.float32) * LOG2E
            m_new = gl.maximum(m_i, sink)
            alpha = gl.exp2(m_i - m_new)
            l_i = l_i * alpha + gl.exp2(sink - m_new)
            acc *= gl.convert_layout(alpha, gl.SliceLayout(1, ACC_LAYOUT))[:, None]
        rescale = 1 / gl.where(l_i > 0, l_i, 1.0)  # zeros for a query without visible keys
        if v_scale is not None:
            rescale *= v_scale
        acc *= gl.convert_layout(rescale, gl.SliceLayout(1, ACC_LAYOUT))[:, None]
        result.store(acc.to(result.dtype))
        place = gl.multiple_of(out + token * out_strides[0] + query_head * out_strides[1], 16)
        gl.store(place[:, None] + column[None, :], result.load(ROW_LAYOUT), inside)
    if BLOCK_D > MOST_PREFETCHED_D:
        following = _queries(WARPGROUP_INDEX, tensors, scheduler, taken + 1, len(q), GROUP, HEAD_SIZE, BLOCK_D)
    num_queries, rows = following
    return done, num_cleared, num_queries, rows


@gluon.jit
def _store_partial(
    acc, m_i, l_i, partials, stats, partial, row, num_rows, WARPGROUP_INDEX: gl.constexpr, BLOCK_D: gl.constexpr
):  # fmt: skip
    """Stores a partial result, for combine_rows. row: of each of m_i. partial: its index among all of a launch."""
    first_row = partial.to(gl.int64) * rows_of_tile(BLOCK_D)
    gl.store(stats + (first_row + row) * STATS, m_i, row < num_rows)
    gl.store(stats + (first_row + row) * STATS + 1, l_i, row < num_rows)
    LAYOUT: gl.constexpr = acc.type.layout
    row = WARPGROUP_INDEX * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, BLOCK_D, gl.SliceLayout(0, LAYOUT))
    place = partials + (first_row + row)[:, None] * BLOCK_D + column[None, :]
    gl.store(place, acc, (row < num_rows)[:, None])


@gluon.jit
def _skip_tile(
    WARPGROUP_INDEX: gl.constexpr, ring, done, num_cleared, num_queries, first_position, seq_len, split, split_blocks,
    BOX_ROWS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Releases the blocks of a tile whose rows all belong to other warpgroups. Returns the counts so far."""
    _, values, full_keys, empty_keys, full_values, empty_values, cleared = ring
    STAGES: gl.constexpr = values.shape[0]
    low, _, num_blocks, num_right, _ = blocks(first_position, num_queries, seq_len, BOX_ROWS, LEFT, RIGHT, BLOCK_N)
    first, last = steps_of(split, split_blocks, num_blocks)
    before = done - first
    for step in range(first, last):
        place, phase = (before + step) % STAGES, (before + step) // STAGES & 1
        mbarrier.wait(full_keys.index(place), phase)
        mbarrier.arrive(empty_keys.index(place))
        mbarrier.wait(full_values.index(place), phase)
        start = start_of(step, low, num_blocks, num_right, BLOCK_N)
        if (step == 0) & (start + BLOCK_N > seq_len):
            _clear(WARPGROUP_INDEX, values.index(place), seq_len - start, cleared, num_cleared)
            num_cleared += 1
        mbarrier.arrive(empty_values.index(place))
    return before + last, num_cleared


@gluon.jit
def _score(q, ring, at, BLOCK_N: gl.constexpr, SCORE_LAYOUT: gl.constexpr):
    """Starts the product of the queries and a block of keys."""
    keys, full_keys = ring[0], ring[2]
    STAGES: gl.constexpr = keys.shape[0]
    mbarrier.wait(full_keys.index(at % STAGES), at // STAGES & 1)
    k = keys.index(at % STAGES).permute((1, 0))
    zeros = gl.zeros([WARPGROUP_ROWS, BLOCK_N], gl.float32, SCORE_LAYOUT)
    # The smaller part comes first, because sums of products in fp8 keep some 14 bits.
    score = hopper.warpgroup_mma(q[len(q) - 1], k, zeros, use_acc=False, is_async=True)
    if len(q) > 1:
        score = hopper.warpgroup_mma(q[0], k, score, is_async=True)
    return score


@gluon.jit
def _add(acc, p, ring, at):
    """Starts the product of the weights and a block of values, added to acc."""
    values, full_values = ring[1], ring[4]
    STAGES: gl.constexpr = values.shape[0]
    mbarrier.wait(full_values.index(at % STAGES), at // STAGES & 1)
    return hopper.warpgroup_mma(p, values.index(at % STAGES), acc, is_async=True)


@gluon.jit
def _step(
    acc, p, m_i, l_i, at, q, ring, scales, start, position, seq_len,
    MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_N: gl.constexpr,
    SCORE_LAYOUT: gl.constexpr, ACC_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Adds the previous block's values, and computes the weights of this block's keys meanwhile."""
    values, empty_keys, empty_values = ring[1], ring[3], ring[5]
    STAGES: gl.constexpr = values.shape[0]
    score = _score(q, ring, at, BLOCK_N, SCORE_LAYOUT)
    acc = _add(acc, p, ring, at - 1)
    score = hopper.warpgroup_mma_wait(1, deps=(score,))
    mbarrier.arrive(empty_keys.index(at % STAGES))
    following, m_i, l_i, alpha = _softmax(
        score, m_i, l_i, scales, start, position, seq_len, MASKED, LEFT, RIGHT, BLOCK_N, SCORE_LAYOUT, ACC_LAYOUT,
        values.dtype,
    )  # fmt: skip
    acc, _, following = hopper.warpgroup_mma_wait(0, deps=(acc, p, following))
    mbarrier.arrive(empty_values.index((at - 1) % STAGES))
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, ACC_LAYOUT))[:, None], following, m_i, l_i


@gluon.jit
def _softmax(
    score, m_i, l_i, scales, start, position, seq_len,
    MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_N: gl.constexpr,
    SCORE_LAYOUT: gl.constexpr, ACC_LAYOUT: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The weights of a block, the new m_i and l_i, and alpha.

    scales: the factor of scores in units of log2, and the factor before tanh; None if scores are not capped. A factor
    is one number, or one for each row.
    """
    scale_log2, scale_of_tanh = scales
    if scale_of_tanh is not None:
        score = _tanh(score * _of_rows(scale_of_tanh))
    if MASKED:
        key_position = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORE_LAYOUT))
        seen = is_visible(key_position[None, :] - position[:, None], (key_position < seq_len)[None, :], LEFT, RIGHT)
        score = gl.where(seen, score, float("-inf"))
    peak = gl.max(score, 1) * scale_log2
    if dtype == gl.float16:
        peak -= FP16_PEAK
    m_new = gl.maximum(m_i, peak)
    p = gl.exp2(score * _of_rows(scale_log2) - m_new[:, None])
    alpha = gl.exp2(m_i - m_new)
    l_i = l_i * alpha + gl.sum(p, 1)
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, ACC_LAYOUT, 2)), m_new, l_i, alpha


@gluon.jit
def _of_rows(factor):
    """A factor of scores as scores take it: one number, or one for each row."""
    return factor[:, None] if len(factor.shape) == 1 else factor


@gluon.jit
def _tanh(x):
    """The hardware's tanh, within 2^-11 of the result: one instruction where the other kernels' formula takes two."""
    code: gl.constexpr = "tanh.approx.f32 $0, $1;"
    return gl.inline_asm_elementwise(code, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _clear(WARPGROUP_INDEX: gl.constexpr, values, num_rows, cleared, num_cleared):
    """Stores zeros into a block of values from row num_rows on.

    These rows may hold NaN, which a weight of zero would not hide. Each of the first two warpgroups clears half of the
    block. All wait for each other.
    """
    NUM_ROWS: gl.constexpr = values.shape[0] // CLEARING_WARPGROUPS
    ROW_LAYOUT: gl.constexpr = coalesced(values.shape[1])
    if WARPGROUP_INDEX < CLEARING_WARPGROUPS:
        values = values.slice(WARPGROUP_INDEX * NUM_ROWS, NUM_ROWS)
        row = WARPGROUP_INDEX * NUM_ROWS + gl.arange(0, NUM_ROWS, gl.SliceLayout(1, ROW_LAYOUT))
        values.store(gl.where((row < num_rows)[:, None], values.load(ROW_LAYOUT), 0.0))
        hopper.fence_async_shared()
    mbarrier.arrive(cleared)
    mbarrier.wait(cleared, num_cleared & 1)
