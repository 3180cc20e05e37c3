"""The kernel of paged_attention for prefill on Hopper GPUs, specialised by warps.

A persistent program takes one query tile after the other. Two loading warps (`_load_sm90`) have the tensor memory
accelerator (TMA) bring keys and values into rings of STAGES blocks in shared memory. One of them is the tile scheduler:
it draws tiles and publishes them to the other warps. Two warpgroups attend half of a tile's rows each: while one
computes exponentials, the other's matrix products (wgmma) run. If a tile has rows for one warpgroup alone, such as that
of a decoded token, the other one skips it. If there are few tiles, each is
attended in several splits of its keys, which leave partial results for prefill.combine_prefill.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._load_sm90 import available, is_aligned
from vllm_opset.kernels.triton.paged_attention import _call, prefill
from vllm_opset.kernels.triton.paged_attention._call import MIN_ROWS, WARPGROUP, Call, thresholds
from vllm_opset.kernels.triton.paged_attention._load_sm90 import (
    COLUMNS,
    ROWS,
    TILE_FIELDS,
    TILE_SLOTS,
    await_tile,
    blocks,
    load_keys,
    load_values,
    read_tile,
    start_of,
    steps_of,
)  # fmt: skip
from vllm_opset.kernels.triton.paged_attention._tile import LOG2E, LOWEST, is_visible

ELEMENT_BYTES = 2  # wgmma multiplies queries and keys of 16 bits here
HALF = gl.constexpr(ROWS.value // 2)  # each warpgroup, and so each of its wgmma instructions, has half of a tile's rows
# Registers of a thread. Two warpgroups, and a third for the loading warps, use up those of a Hopper multiprocessor,
# which is the only one that runs this kernel: 64 Ki registers hold 128 threads * (2 * 232 + 40).
ATTENDING_REGISTERS = gl.constexpr(232)
LOADING_REGISTERS = gl.constexpr(40)


@gluon.jit(do_not_specialize=["num_pages", "num_reqs", "num_tiles", "num_splits", "min_split_keys"])
def attend_prefill_sm90(
    query, query_strides, cache, num_pages, out, out_strides,
    query_start_loc, seq_lens, block_table, table_strides, num_reqs, scale, soft_cap, sinks,
    partials, stats, num_splits, min_split_keys, num_tiles, ticket,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Launches at most as many programs as run at a time.

    query, out: rows of aligned 16-byte units. cache: a TMA descriptor of the KV cache with boxes [1, 1, rows, COLUMNS];
    these rows divide BLOCK_SIZE and BLOCK_N. ticket: zero, and zero again afterwards. partials: None for one split.
    """
    pdl_wait(PDL)
    dtype: gl.constexpr = query.dtype.element_ty
    BOX_ROWS: gl.constexpr = cache.block_type.shape[2]
    NUM_BOXES: gl.constexpr = STAGES * (BLOCK_N // BOX_ROWS) * (BLOCK_D // COLUMNS)
    BOX: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    BLOCK: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)  # boxes of rows, then the next columns
    key_boxes = gl.allocate_shared_memory(dtype, [NUM_BOXES, 1, 1, BOX_ROWS, COLUMNS], BOX)
    value_boxes = gl.allocate_shared_memory(dtype, [NUM_BOXES, 1, 1, BOX_ROWS, COLUMNS], BOX)
    keys = key_boxes._reinterpret(dtype, [STAGES, BLOCK_N, BLOCK_D], BLOCK)
    values = value_boxes._reinterpret(dtype, [STAGES, BLOCK_N, BLOCK_D], BLOCK)
    queries = gl.allocate_shared_memory(dtype, [2, HALF, BLOCK_D], BLOCK)
    tiles = gl.allocate_shared_memory(
        gl.int32, [TILE_SLOTS * TILE_FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    full_keys, empty_keys = _barriers(STAGES, 2)
    full_values, empty_values = _barriers(STAGES, 2)
    full_tiles, empty_tiles = _barriers(TILE_SLOTS, 3)
    cleared = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())  # by both warpgroups
    mbarrier.init(cleared, count=2)
    scheduler = (tiles, full_tiles, empty_tiles)

    tensors = (query, query_strides, out, out_strides, sinks, partials, stats)
    scales, splits = (scale, soft_cap), (num_splits, min_split_keys)
    ring = (keys, values, full_keys, empty_keys, full_values, empty_values, cleared)
    batch = (query_start_loc, seq_lens, block_table, table_strides, num_reqs)
    gl.warp_specialize(
        [
            (_attend, (0, tensors, queries, ring, scheduler, scales, splits,
                       BOX_ROWS, GROUP, HEAD_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D, STAGES)),
            (_attend, (1, tensors, queries, ring, scheduler, scales, splits,
                       BOX_ROWS, GROUP, HEAD_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D, STAGES)),
            (load_keys, (cache, num_pages, key_boxes, full_keys, empty_keys, scheduler, batch, num_tiles, splits,
                         ticket, NUM_KV_HEADS, GROUP, BLOCK_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D, STAGES)),
            (load_values, (cache, num_pages, value_boxes, full_values, empty_values, scheduler, block_table,
                           table_strides, splits, HEAD_SIZE, BLOCK_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D, STAGES)),
        ],
        [4, 1, 1],
        [ATTENDING_REGISTERS, LOADING_REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _barriers(COUNT: gl.constexpr, READERS: gl.constexpr):
    """Two barriers for each place of a ring: it is full, and all of its readers are done."""
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(COUNT):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=READERS)
    return full, empty


@gluon.jit
def _attend(
    HALF_INDEX: gl.constexpr, tensors, queries, ring, scheduler, scales, splits,
    BOX_ROWS: gl.constexpr, GROUP: gl.constexpr, HEAD_SIZE: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Half the rows of each tile that is published, up to one without queries."""
    ROW_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    _, _, empty_tiles = scheduler
    taken, done, num_cleared = 0, 0, 0  # counts of tiles, of key blocks, and of cleared blocks
    num_queries = await_tile(scheduler, taken)
    while num_queries > 0:
        first_token, first_position = read_tile(scheduler, taken, 1), read_tile(scheduler, taken, 2)
        seq_len, head = read_tile(scheduler, taken, 3), read_tile(scheduler, taken, 4)
        split, partial = read_tile(scheduler, taken, 6), read_tile(scheduler, taken, 7)
        mbarrier.arrive(empty_tiles.index(taken % TILE_SLOTS))
        if HALF_INDEX == 0 or num_queries * GROUP > HALF:
            done, num_cleared = _attend_tile(
                HALF_INDEX, tensors, queries.index(HALF_INDEX), ring, done, num_cleared,
                num_queries, first_token, first_position, seq_len, head, split, partial, scales, splits,
                BOX_ROWS, GROUP, HEAD_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D, STAGES, ROW_LAYOUT,
            )  # fmt: skip
        else:
            done, num_cleared = _skip_tile(
                HALF_INDEX, ring, done, num_cleared, num_queries, first_position, seq_len, split, splits,
                BOX_ROWS, LEFT, RIGHT, BLOCK_N, STAGES, ROW_LAYOUT,
            )  # fmt: skip
        taken += 1
        num_queries = await_tile(scheduler, taken)


@gluon.jit
def _attend_tile(
    HALF_INDEX: gl.constexpr, tensors, q, ring, done, num_cleared,
    num_queries, first_token, first_position, seq_len, head, split, partial, scales, splits,
    BOX_ROWS: gl.constexpr, GROUP: gl.constexpr, HEAD_SIZE: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, ROW_LAYOUT: gl.constexpr,
):  # fmt: skip
    """The online softmax of half of a tile's rows over a split, and its result, or partial result.

    q: shared memory for queries and results. Returns the counts so far.
    """
    SCORE_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    query, query_strides, out, out_strides, sinks, partials, stats = tensors
    _, values, _, empty_keys, full_values, empty_values, cleared = ring
    low, _, num_blocks, num_right, num_masked = blocks(
        first_position, num_queries, seq_len, BOX_ROWS, LEFT, RIGHT, BLOCK_N
    )
    first, last, num_used_splits = steps_of(
        split, splits, first_position, num_queries, seq_len, BOX_ROWS, LEFT, RIGHT, BLOCK_N
    )
    before = done - first  # the count of blocks, less the steps of this tile
    row = HALF_INDEX * HALF + gl.arange(0, HALF, gl.SliceLayout(1, ROW_LAYOUT))
    column = gl.arange(0, BLOCK_D, gl.SliceLayout(0, ROW_LAYOUT))
    inside = (row < num_queries * GROUP)[:, None] & (column < HEAD_SIZE)[None, :]
    token, query_head = (first_token + row // GROUP).to(gl.int64), head * GROUP + row % GROUP
    place = gl.multiple_of(query + token * query_strides[0] + query_head * query_strides[1], 16)
    q.store(gl.load(place[:, None] + column[None, :], inside, 0.0))
    hopper.fence_async_shared()

    row = HALF_INDEX * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SCORE_LAYOUT))
    position = first_position + row // GROUP
    scales = _scales_log2(scales)
    acc = gl.zeros([HALF, BLOCK_D], gl.float32, ACC_LAYOUT)
    m_i = gl.full([HALF], LOWEST, gl.float32, gl.SliceLayout(1, SCORE_LAYOUT))
    l_i = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, SCORE_LAYOUT))

    score = hopper.warpgroup_mma_wait(0, deps=(_score(q, ring, done, BLOCK_N, STAGES, SCORE_LAYOUT),))
    mbarrier.arrive(empty_keys.index(done % STAGES))
    start = start_of(first, low, num_blocks, num_right, BLOCK_N)
    p, m_i, l_i, _ = _softmax(
        score, m_i, l_i, scales, start, position, seq_len, True, LEFT, RIGHT, BLOCK_N, SCORE_LAYOUT, ACC_LAYOUT,
        q.dtype,
    )  # fmt: skip
    mbarrier.wait(full_values.index(done % STAGES), done // STAGES & 1)
    if start + BLOCK_N > seq_len:
        _clear(HALF_INDEX, values.index(done % STAGES), seq_len - start, cleared, num_cleared, BLOCK_N // 2, ROW_LAYOUT)
        num_cleared += 1
    for step in range(first + 1, min(num_masked, last)):
        acc, p, m_i, l_i = _step(
            acc, p, m_i, l_i, before + step, q, ring, scales, start_of(step, low, num_blocks, num_right, BLOCK_N),
            position, seq_len, True, LEFT, RIGHT, BLOCK_N, STAGES, SCORE_LAYOUT, ACC_LAYOUT,
        )  # fmt: skip
    for step in range(max(num_masked, first + 1), last):
        acc, p, m_i, l_i = _step(
            acc, p, m_i, l_i, before + step, q, ring, scales, start_of(step, low, num_blocks, num_right, BLOCK_N),
            position, seq_len, False, LEFT, RIGHT, BLOCK_N, STAGES, SCORE_LAYOUT, ACC_LAYOUT,
        )  # fmt: skip
    done = before + last
    acc = _add(acc, p, ring, done - 1, STAGES)
    acc, _ = hopper.warpgroup_mma_wait(0, deps=(acc, p))
    mbarrier.arrive(empty_values.index((done - 1) % STAGES))

    stored = False
    if partials is not None:
        stored = num_used_splits > 1
        if stored:
            _store_partial(acc, m_i, l_i, partials, stats, partial, row, num_queries * GROUP, HALF_INDEX, BLOCK_D)
    if not stored:
        if sinks is not None:
            sink = gl.load(sinks + head * GROUP + row % GROUP).to(gl.float32) * LOG2E
            m_new = gl.maximum(m_i, sink)
            alpha = gl.exp2(m_i - m_new)
            l_i = l_i * alpha + gl.exp2(sink - m_new)
            acc *= gl.convert_layout(alpha, gl.SliceLayout(1, ACC_LAYOUT))[:, None]
        rescale = 1 / gl.where(l_i > 0, l_i, 1.0)  # zeros for a query without visible keys
        q.store((acc * gl.convert_layout(rescale, gl.SliceLayout(1, ACC_LAYOUT))[:, None]).to(q.dtype))
        place = gl.multiple_of(out + token * out_strides[0] + query_head * out_strides[1], 16)
        gl.store(place[:, None] + column[None, :], q.load(ROW_LAYOUT), inside)
    return done, num_cleared


@gluon.jit
def _store_partial(
    acc, m_i, l_i, partials, stats, partial, row, num_rows, HALF_INDEX: gl.constexpr, BLOCK_D: gl.constexpr
):  # fmt: skip
    """Stores a partial result, for combine_rows. row: of each of m_i. partial: its index among all of a launch."""
    first_row = partial.to(gl.int64) * ROWS
    gl.store(stats + (first_row + row) * 2, m_i, row < num_rows)
    gl.store(stats + (first_row + row) * 2 + 1, l_i, row < num_rows)
    LAYOUT: gl.constexpr = acc.type.layout
    row = HALF_INDEX * HALF + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, BLOCK_D, gl.SliceLayout(0, LAYOUT))
    place = partials + (first_row + row)[:, None] * BLOCK_D + column[None, :]
    gl.store(place, acc, (row < num_rows)[:, None])


@gluon.jit
def _skip_tile(
    HALF_INDEX: gl.constexpr, ring, done, num_cleared, num_queries, first_position, seq_len, split, splits,
    BOX_ROWS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    ROW_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Releases the blocks of a tile whose rows are all in the other half. Returns the counts so far."""
    _, values, full_keys, empty_keys, full_values, empty_values, cleared = ring
    low, _, num_blocks, num_right, _ = blocks(first_position, num_queries, seq_len, BOX_ROWS, LEFT, RIGHT, BLOCK_N)
    first, last, _ = steps_of(split, splits, first_position, num_queries, seq_len, BOX_ROWS, LEFT, RIGHT, BLOCK_N)
    before = done - first
    for step in range(first, last):
        place, phase = (before + step) % STAGES, (before + step) // STAGES & 1
        mbarrier.wait(full_keys.index(place), phase)
        mbarrier.arrive(empty_keys.index(place))
        mbarrier.wait(full_values.index(place), phase)
        start = start_of(step, low, num_blocks, num_right, BLOCK_N)
        if (step == 0) & (start + BLOCK_N > seq_len):
            _clear(HALF_INDEX, values.index(place), seq_len - start, cleared, num_cleared, BLOCK_N // 2, ROW_LAYOUT)
            num_cleared += 1
        mbarrier.arrive(empty_values.index(place))
    return before + last, num_cleared


@gluon.jit
def _score(q, ring, at, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SCORE_LAYOUT: gl.constexpr):
    """Starts the product of the queries and a block of keys."""
    keys, full_keys = ring[0], ring[2]
    mbarrier.wait(full_keys.index(at % STAGES), at // STAGES & 1)
    zeros = gl.zeros([HALF, BLOCK_N], gl.float32, SCORE_LAYOUT)
    return hopper.warpgroup_mma(q, keys.index(at % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _add(acc, p, ring, at, STAGES: gl.constexpr):
    """Starts the product of the weights and a block of values, added to acc."""
    values, full_values = ring[1], ring[4]
    mbarrier.wait(full_values.index(at % STAGES), at // STAGES & 1)
    return hopper.warpgroup_mma(p, values.index(at % STAGES), acc, is_async=True)


@gluon.jit
def _step(
    acc, p, m_i, l_i, at, q, ring, scales, start, position, seq_len,
    MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SCORE_LAYOUT: gl.constexpr, ACC_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Adds the previous block's values, and computes the weights of this block's keys meanwhile."""
    empty_keys, empty_values = ring[3], ring[5]
    score = _score(q, ring, at, BLOCK_N, STAGES, SCORE_LAYOUT)
    acc = _add(acc, p, ring, at - 1, STAGES)
    score = hopper.warpgroup_mma_wait(1, deps=(score,))
    mbarrier.arrive(empty_keys.index(at % STAGES))
    following, m_i, l_i, alpha = _softmax(
        score, m_i, l_i, scales, start, position, seq_len, MASKED, LEFT, RIGHT, BLOCK_N, SCORE_LAYOUT, ACC_LAYOUT,
        q.dtype,
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
    """The weights of a block, the new m_i and l_i, and alpha."""
    scale_log2, scale_of_tanh = scales
    if scale_of_tanh is not None:
        score = _tanh(score * scale_of_tanh)
    if MASKED:
        key_position = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORE_LAYOUT))
        seen = is_visible(key_position[None, :] - position[:, None], (key_position < seq_len)[None, :], LEFT, RIGHT)
        score = gl.where(seen, score, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(score, 1) * scale_log2)
    p = gl.exp2(score * scale_log2 - m_new[:, None])
    alpha = gl.exp2(m_i - m_new)
    l_i = l_i * alpha + gl.sum(p, 1)
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, ACC_LAYOUT, 2)), m_new, l_i, alpha


@gluon.jit
def _scales_log2(scales):
    """The factor of scores in units of log2, and the factor before tanh; None if scores are not capped."""
    scale, soft_cap = scales
    scale_log2, scale_of_tanh = scale * LOG2E, None
    if soft_cap is not None:
        scale_log2, scale_of_tanh = soft_cap * LOG2E, scale / soft_cap
    return scale_log2, scale_of_tanh


@gluon.jit
def _tanh(x):
    """The hardware's tanh, within 2^-11 of the result: one instruction where the other kernels' formula takes two."""
    code: gl.constexpr = "tanh.approx.f32 $0, $1;"
    return gl.inline_asm_elementwise(code, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _clear(
    HALF_INDEX: gl.constexpr, values, num_rows, cleared, num_cleared, NUM_ROWS: gl.constexpr, ROW_LAYOUT: gl.constexpr
):  # fmt: skip
    """Stores zeros into a block of values from row num_rows on.

    These rows may hold NaN, which a weight of zero would not hide. Each warpgroup clears half of the block, NUM_ROWS
    rows, and waits for the other one.
    """
    values = values.slice(HALF_INDEX * NUM_ROWS, NUM_ROWS)
    row = HALF_INDEX * NUM_ROWS + gl.arange(0, NUM_ROWS, gl.SliceLayout(1, ROW_LAYOUT))
    values.store(gl.where((row < num_rows)[:, None], values.load(ROW_LAYOUT), 0.0))
    hopper.fence_async_shared()
    mbarrier.arrive(cleared)
    mbarrier.wait(cleared, num_cleared & 1)


def can_prefill_sm90(call: Call) -> bool:
    """Whether a Hopper GPU's copy engine and matrix instructions take these inputs."""
    if not available(call.query.device):
        return False
    plain = call.alibi_slopes is None and call.k_scale is None and call.v_scale is None
    halves = call.query.element_size() == ELEMENT_BYTES and call.kv_cache.dtype == call.query.dtype
    boxes = call.head_size >= COLUMNS.value and call.block_size % MIN_ROWS == 0
    return plain and halves and boxes and all(map(is_aligned, (call.query, call.kv_cache, call.out)))


def suits_prefill_sm90(call: Call) -> bool:
    """Whether no other variant is faster: for more rows than `verify` takes, and for drafts that fill the GPU."""
    num_programs, table = _launch.multiprocessors(call.query.device), thresholds(call.query.device)
    many = call.num_reqs * call.num_kv_heads >= table["verify_tiles_sm90"] * num_programs
    drafts = call.most_rows > MIN_ROWS and many and call.batch.max_seq_len <= table["verify_keys_sm90"]
    return call.most_rows > table["verify_rows"] or drafts


def launch_prefill_sm90(call: Call) -> None:
    """One launch of persistent programs, and another to combine partial results where keys are split."""
    device, batch, cache = call.query.device, call.batch, call.kv_cache
    values = _launch.parameters("paged_attention_prefill_sm90", device, call.span(ROWS.value // call.group))
    block_n, split_keys, num_tiles = call.block_n(values), values["split_keys"], _num_tiles(call)
    num_splits = prefill.most_splits(call, values, num_tiles, ROWS.value)
    partials = (None, None)
    if num_splits > 1:
        partials = batch.once(_call.workspace, num_tiles * num_splits, ROWS.value, call.block_d)
    box = [1, 1, math.gcd(call.block_size, block_n), COLUMNS.value]
    descriptor = TensorDescriptor.from_tensor(cache, box, NVMMASharedLayout(128, 16, rank=len(box)))
    attend_prefill_sm90[(min(num_tiles * num_splits, _launch.multiprocessors(device)),)](
        call.query, call.query.stride(), descriptor, len(cache), call.out, call.out.stride(),
        batch.query_start_loc, batch.seq_lens, batch.block_table, batch.block_table.stride(), call.num_reqs,
        call.scale, call.soft_cap or None, call.sinks, *partials, num_splits, split_keys,
        num_tiles, batch.once(_call.tickets, 1),
        NUM_KV_HEADS=call.num_kv_heads, GROUP=call.group, HEAD_SIZE=call.head_size, BLOCK_SIZE=call.block_size,
        LEFT=call.left, RIGHT=call.right, BLOCK_N=block_n, BLOCK_D=call.block_d, STAGES=values["stages"],
        num_warps=WARPGROUP, **_launch.launch_options(device),
    )  # fmt: skip
    if num_splits > 1:
        prefill.launch_combine(call, partials, num_tiles, num_splits, split_keys, ROWS.value, box[2], block_n)


def _num_tiles(call: Call) -> int:
    return (len(call.query) // (ROWS.value // call.group) + call.num_reqs) * call.num_kv_heads
