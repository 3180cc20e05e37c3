"""The device code of paged_attention for many queries on Hopper GPUs: warps that load beside warps that multiply.

A program takes one query tile after the other. Two warps (_paged_attention_hopper_load) have the copy engine bring keys
and values into rings of STAGES blocks in shared memory; one of them draws the tiles and posts them on a board. Two
groups of 4 warps attend half the rows each: while one exponentiates, the products of the other run. If a tile is half
empty, such as one of a token that is decoded, one of them passes it on.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from vllm_opset.kernels.triton._launch import begin
from vllm_opset.kernels.triton.paged_attention._load_sm90 import (
    COLUMNS,
    FIELDS,
    POSTS,
    ROWS,
    await_post,
    blocks,
    load_keys,
    load_values,
    read_post,
    start_of,
)  # fmt: skip
from vllm_opset.kernels.triton.paged_attention._tile import LOG2E, LOWEST, is_visible

HALF = gl.constexpr(ROWS.value // 2)  # the rows that a matrix instruction of a group of 4 warps takes
# Of a thread. Two groups, and a third that is there for the loading warps, use up the multiprocessor's registers.
ATTENDING_REGISTERS = gl.constexpr(232)
LOADING_REGISTERS = gl.constexpr(40)


@gluon.jit(do_not_specialize=["num_pages", "num_reqs", "num_tiles"])
def attend_many_on_hopper(
    query, query_strides, cache, num_pages, out, out_strides,
    query_start_loc, seq_lens, block_table, table_strides, num_reqs, scale, sinks, num_tiles, ticket,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """As many programs as run at once, or fewer. query, out: rows of aligned 16-byte units. cache: a descriptor of the
    KV cache with boxes [1, 1, rows, COLUMNS], whose rows divide BLOCK_SIZE and BLOCK_N. ticket: zero, and left so.
    """
    begin(OVERLAP)
    dtype: gl.constexpr = query.dtype.element_ty
    BOX_ROWS: gl.constexpr = cache.block_type.shape[2]
    NUM_BOXES: gl.constexpr = STAGES * (BLOCK_N // BOX_ROWS) * (BLOCK_D // COLUMNS)
    BOX: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    BLOCK: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)  # boxes below each other, then the next columns
    key_boxes = gl.allocate_shared_memory(dtype, [NUM_BOXES, 1, 1, BOX_ROWS, COLUMNS], BOX)
    value_boxes = gl.allocate_shared_memory(dtype, [NUM_BOXES, 1, 1, BOX_ROWS, COLUMNS], BOX)
    keys = key_boxes._reinterpret(dtype, [STAGES, BLOCK_N, BLOCK_D], BLOCK)
    values = value_boxes._reinterpret(dtype, [STAGES, BLOCK_N, BLOCK_D], BLOCK)
    queries = gl.allocate_shared_memory(dtype, [2, HALF, BLOCK_D], BLOCK)
    posts = gl.allocate_shared_memory(gl.int32, [POSTS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    full_keys, empty_keys = _barriers(STAGES, 2)
    full_values, empty_values = _barriers(STAGES, 2)
    full_posts, empty_posts = _barriers(POSTS, 3)
    cleared = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())  # both halves of a block's end
    mbarrier.init(cleared, count=2)
    board = (posts, full_posts, empty_posts)

    tensors = (query, query_strides, out, out_strides, sinks)
    ring = (keys, values, full_keys, empty_keys, full_values, empty_values, cleared)
    batch = (query_start_loc, seq_lens, block_table, table_strides, num_reqs)
    gl.warp_specialize(
        [
            (_attend, (0, tensors, queries, ring, board, scale,
                       BOX_ROWS, GROUP, HEAD_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D, STAGES)),
            (_attend, (1, tensors, queries, ring, board, scale,
                       BOX_ROWS, GROUP, HEAD_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D, STAGES)),
            (load_keys, (cache, num_pages, key_boxes, full_keys, empty_keys, board, batch, num_tiles, ticket,
                         NUM_KV_HEADS, GROUP, BLOCK_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D, STAGES)),
            (load_values, (cache, num_pages, value_boxes, full_values, empty_values, board, block_table, table_strides,
                           HEAD_SIZE, BLOCK_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D, STAGES)),
        ],
        [4, 1, 1],
        [ATTENDING_REGISTERS, LOADING_REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _barriers(COUNT: gl.constexpr, READERS: gl.constexpr):
    """For each place of a ring, one that says that it is full, and one that says that all its readers are done."""
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(COUNT):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=READERS)
    return full, empty


@gluon.jit
def _attend(
    HALF_INDEX: gl.constexpr, tensors, queries, ring, board, scale,
    BOX_ROWS: gl.constexpr, GROUP: gl.constexpr, HEAD_SIZE: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Half the rows of each tile that is posted, up to a post of no queries."""
    PLACES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    _, _, empty_posts = board
    taken, done, num_cleared = 0, 0, 0  # tiles, blocks of keys, and those of them that were cleared
    num_queries = await_post(board, taken)
    while num_queries > 0:
        first_token, first_position = read_post(board, taken, 1), read_post(board, taken, 2)
        seq_len, head = read_post(board, taken, 3), read_post(board, taken, 4)
        mbarrier.arrive(empty_posts.index(taken % POSTS))
        if HALF_INDEX == 0 or num_queries * GROUP > HALF:
            done, num_cleared = _attend_tile(
                HALF_INDEX, tensors, queries.index(HALF_INDEX), ring, done, num_cleared,
                num_queries, first_token, first_position, seq_len, head, scale,
                BOX_ROWS, GROUP, HEAD_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D, STAGES, PLACES,
            )  # fmt: skip
        else:
            done, num_cleared = _pass_tile(
                HALF_INDEX, ring, done, num_cleared, num_queries, first_position, seq_len,
                BOX_ROWS, LEFT, RIGHT, BLOCK_N, STAGES, PLACES,
            )  # fmt: skip
        taken += 1
        num_queries = await_post(board, taken)


@gluon.jit
def _attend_tile(
    HALF_INDEX: gl.constexpr, tensors, q, ring, done, num_cleared,
    num_queries, first_token, first_position, seq_len, head, scale,
    BOX_ROWS: gl.constexpr, GROUP: gl.constexpr, HEAD_SIZE: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """The online softmax of half the rows of a tile, and its result. q: room for both. Returns the counts so far."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    query, query_strides, out, out_strides, sinks = tensors
    _, values, _, empty_keys, full_values, empty_values, cleared = ring
    low, _, num_blocks, num_right, num_masked = blocks(
        first_position, num_queries, seq_len, BOX_ROWS, LEFT, RIGHT, BLOCK_N
    )
    row = HALF_INDEX * HALF + gl.arange(0, HALF, gl.SliceLayout(1, PLACES))
    column = gl.arange(0, BLOCK_D, gl.SliceLayout(0, PLACES))
    inside = (row < num_queries * GROUP)[:, None] & (column < HEAD_SIZE)[None, :]
    token, query_head = (first_token + row // GROUP).to(gl.int64), head * GROUP + row % GROUP
    place = gl.multiple_of(query + token * query_strides[0] + query_head * query_strides[1], 16)
    q.store(gl.load(place[:, None] + column[None, :], inside, 0.0))
    hopper.fence_async_shared()

    row = HALF_INDEX * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
    position = first_position + row // GROUP
    unit = scale * LOG2E
    acc = gl.zeros([HALF, BLOCK_D], gl.float32, RESULT)
    top = gl.full([HALF], LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, SCORES))

    score = hopper.warpgroup_mma_wait(0, deps=(_score(q, ring, done, BLOCK_N, STAGES, SCORES),))
    mbarrier.arrive(empty_keys.index(done % STAGES))
    start = start_of(0, low, num_blocks, num_right, BLOCK_N)
    weight, top, total, _ = _weigh(
        score, top, total, unit, start, position, seq_len, True, LEFT, RIGHT, BLOCK_N, SCORES, RESULT, q.dtype
    )
    mbarrier.wait(full_values.index(done % STAGES), done // STAGES & 1)
    if start + BLOCK_N > seq_len:
        _clear(HALF_INDEX, values.index(done % STAGES), seq_len - start, cleared, num_cleared, BLOCK_N // 2, PLACES)
        num_cleared += 1
    for turn in range(1, num_masked):
        acc, weight, top, total = _step(
            acc, weight, top, total, done + turn, q, ring, unit, start_of(turn, low, num_blocks, num_right, BLOCK_N),
            position, seq_len, True, LEFT, RIGHT, BLOCK_N, STAGES, SCORES, RESULT,
        )  # fmt: skip
    for turn in range(num_masked, num_blocks):
        acc, weight, top, total = _step(
            acc, weight, top, total, done + turn, q, ring, unit, start_of(turn, low, num_blocks, num_right, BLOCK_N),
            position, seq_len, False, LEFT, RIGHT, BLOCK_N, STAGES, SCORES, RESULT,
        )  # fmt: skip
    done += num_blocks
    acc = _add(acc, weight, ring, done - 1, STAGES)
    acc, _ = hopper.warpgroup_mma_wait(0, deps=(acc, weight))
    mbarrier.arrive(empty_values.index((done - 1) % STAGES))

    if sinks is not None:
        sink = gl.load(sinks + head * GROUP + row % GROUP).to(gl.float32) * LOG2E
        highest = gl.maximum(top, sink)
        decay = gl.exp2(top - highest)
        total = total * decay + gl.exp2(sink - highest)
        acc *= gl.convert_layout(decay, gl.SliceLayout(1, RESULT))[:, None]
    share = 1 / gl.where(total > 0, total, 1.0)  # zeros for a query that has seen no key
    q.store((acc * gl.convert_layout(share, gl.SliceLayout(1, RESULT))[:, None]).to(q.dtype))
    place = gl.multiple_of(out + token * out_strides[0] + query_head * out_strides[1], 16)
    gl.store(place[:, None] + column[None, :], q.load(PLACES), inside)
    return done, num_cleared


@gluon.jit
def _pass_tile(
    HALF_INDEX: gl.constexpr, ring, done, num_cleared, num_queries, first_position, seq_len,
    BOX_ROWS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    PLACES: gl.constexpr,
):  # fmt: skip
    """Hands back the blocks of a tile that has rows in the other half alone. Returns the counts so far."""
    _, values, full_keys, empty_keys, full_values, empty_values, cleared = ring
    low, _, num_blocks, num_right, _ = blocks(first_position, num_queries, seq_len, BOX_ROWS, LEFT, RIGHT, BLOCK_N)
    for turn in range(num_blocks):
        place, phase = (done + turn) % STAGES, (done + turn) // STAGES & 1
        mbarrier.wait(full_keys.index(place), phase)
        mbarrier.arrive(empty_keys.index(place))
        mbarrier.wait(full_values.index(place), phase)
        start = start_of(turn, low, num_blocks, num_right, BLOCK_N)
        if (turn == 0) & (start + BLOCK_N > seq_len):
            _clear(HALF_INDEX, values.index(place), seq_len - start, cleared, num_cleared, BLOCK_N // 2, PLACES)
            num_cleared += 1
        mbarrier.arrive(empty_values.index(place))
    return done + num_blocks, num_cleared


@gluon.jit
def _score(q, ring, at, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr):
    """Starts to multiply the queries by a block of keys."""
    keys, full_keys = ring[0], ring[2]
    mbarrier.wait(full_keys.index(at % STAGES), at // STAGES & 1)
    zeros = gl.zeros([HALF, BLOCK_N], gl.float32, SCORES)
    return hopper.warpgroup_mma(q, keys.index(at % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _add(acc, weight, ring, at, STAGES: gl.constexpr):
    """Starts to add a block of values by their weights."""
    values, full_values = ring[1], ring[4]
    mbarrier.wait(full_values.index(at % STAGES), at // STAGES & 1)
    return hopper.warpgroup_mma(weight, values.index(at % STAGES), acc, is_async=True)


@gluon.jit
def _step(
    acc, weight, top, total, at, q, ring, unit, start, position, seq_len,
    MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SCORES: gl.constexpr, RESULT: gl.constexpr,
):  # fmt: skip
    """Adds the values of the block before, and weighs this block's keys."""
    empty_keys, empty_values = ring[3], ring[5]
    score = _score(q, ring, at, BLOCK_N, STAGES, SCORES)
    acc = _add(acc, weight, ring, at - 1, STAGES)
    score = hopper.warpgroup_mma_wait(1, deps=(score,))
    mbarrier.arrive(empty_keys.index(at % STAGES))
    following, top, total, decay = _weigh(
        score, top, total, unit, start, position, seq_len, MASKED, LEFT, RIGHT, BLOCK_N, SCORES, RESULT, q.dtype
    )
    acc, _, following = hopper.warpgroup_mma_wait(0, deps=(acc, weight, following))
    mbarrier.arrive(empty_values.index((at - 1) % STAGES))
    return acc * gl.convert_layout(decay, gl.SliceLayout(1, RESULT))[:, None], following, top, total


@gluon.jit
def _weigh(
    score, top, total, unit, start, position, seq_len,
    MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_N: gl.constexpr,
    SCORES: gl.constexpr, RESULT: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The softmax's weights of a block, and what the sums so far are to be multiplied by."""
    if MASKED:
        key_position = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
        seen = is_visible(key_position[None, :] - position[:, None], (key_position < seq_len)[None, :], LEFT, RIGHT)
        score = gl.where(seen, score, float("-inf"))
    highest = gl.maximum(top, gl.max(score, 1) * unit)
    weight = gl.exp2(score * unit - highest[:, None])
    decay = gl.exp2(top - highest)
    total = total * decay + gl.sum(weight, 1)
    return gl.convert_layout(weight.to(dtype), gl.DotOperandLayout(0, RESULT, 2)), highest, total, decay


@gluon.jit
def _clear(
    HALF_INDEX: gl.constexpr, values, num_rows, cleared, num_cleared, NUM_ROWS: gl.constexpr, PLACES: gl.constexpr
):  # fmt: skip
    """Zeros in a block from row num_rows on, which may hold NaN: a weight of zero would not hide it. Each group writes
    half of the block, of NUM_ROWS, and waits for the other.
    """
    values = values.slice(HALF_INDEX * NUM_ROWS, NUM_ROWS)
    row = HALF_INDEX * NUM_ROWS + gl.arange(0, NUM_ROWS, gl.SliceLayout(1, PLACES))
    values.store(gl.where((row < num_rows)[:, None], values.load(PLACES), 0.0))
    hopper.fence_async_shared()
    mbarrier.arrive(cleared)
    mbarrier.wait(cleared, num_cleared & 1)
