"""The loading warps of prefill_sm90: the tile scheduler, and the loads of keys and values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from vllm_opset.kernels.triton.paged_attention._tile import seen_by_all
from vllm_opset.kernels.triton.paged_attention.prefill import REQUESTS, queries_of, split_keys_of

ROWS = gl.constexpr(128)  # in a query tile
COLUMNS = gl.constexpr(64)  # in a box: 128 bytes, the width of the swizzle of shared memory
TILE_SLOTS = gl.constexpr(2)  # published tiles that fit shared memory
TILE_FIELDS = gl.constexpr(8)  # numbers that describe a tile


@gluon.jit
def load_keys(
    cache, num_pages, boxes, full, empty, scheduler, batch, num_tiles, splits, ticket,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Draws splits of tiles in the order of prefill._request_of, publishes them and loads their keys."""
    BOX_ROWS: gl.constexpr = cache.block_type.shape[2]
    num_splits = splits[0]
    query_start_loc, seq_lens, block_table, table_strides, num_reqs = batch
    published, loaded = 0, 0  # counts of tiles and of key blocks
    drawn = gl.program_id(0)
    while drawn < num_tiles * num_splits:
        head, split = drawn % NUM_KV_HEADS, drawn // NUM_KV_HEADS % num_splits
        tile = drawn // (NUM_KV_HEADS * num_splits)
        request = _request_of(tile, query_start_loc, num_reqs, ROWS // GROUP)
        first_token, seq_len = gl.load(query_start_loc + request), gl.load(seq_lens + request)
        query_len = gl.load(query_start_loc + request + 1) - first_token
        first_query, num_queries = queries_of(tile, first_token, query_len, num_reqs, ROWS // GROUP)
        first_position = seq_len - query_len + first_query
        first, last, _ = steps_of(split, splits, first_position, num_queries, seq_len, BOX_ROWS, LEFT, RIGHT, BLOCK_N)
        if (num_queries > 0) & (first < last):
            partial = (tile * NUM_KV_HEADS + head) * num_splits + split
            _publish(
                scheduler, published,
                (num_queries, first_token + first_query, first_position, seq_len, head, request, split, partial),
            )  # fmt: skip
            published += 1
            loaded = _load_tile(
                cache, num_pages, boxes, full, empty, block_table, table_strides, loaded,
                num_queries, first_position, seq_len, head, request, split, splits,
                0, BLOCK_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D, STAGES,
            )  # fmt: skip
        number = gl.atomic_add(ticket, 1)
        if number == num_tiles * num_splits - 1:  # the last draw of all: each program's last one finds no tile
            gl.store(ticket, 0)
        drawn = gl.num_programs(0) + number
    _publish(scheduler, published, (0,))


@gluon.jit
def load_values(
    cache, num_pages, boxes, full, empty, scheduler, block_table, table_strides, splits,
    HEAD_SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Brings the values of each tile that is published, up to one without queries."""
    _, _, empty_tiles = scheduler
    taken, loaded = 0, 0  # counts of tiles and of value blocks
    num_queries = await_tile(scheduler, taken)
    while num_queries > 0:
        first_position, seq_len = read_tile(scheduler, taken, 2), read_tile(scheduler, taken, 3)
        head, request = read_tile(scheduler, taken, 4), read_tile(scheduler, taken, 5)
        split = read_tile(scheduler, taken, 6)
        mbarrier.arrive(empty_tiles.index(taken % TILE_SLOTS))
        loaded = _load_tile(
            cache, num_pages, boxes, full, empty, block_table, table_strides, loaded,
            num_queries, first_position, seq_len, head, request, split, splits,
            HEAD_SIZE, BLOCK_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D, STAGES,
        )  # fmt: skip
        taken += 1
        num_queries = await_tile(scheduler, taken)


@gluon.jit
def _request_of(tile, query_start_loc, num_reqs, QUERIES: gl.constexpr):
    """The request of a tile, as in prefill._request_of; Gluon needs an explicit layout."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([REQUESTS // 32], [32], [gl.num_warps()], [0])
    request = tile
    if tile >= num_reqs:
        request = -1
        for first in range(0, num_reqs, REQUESTS):
            candidate = first + gl.arange(0, REQUESTS, LAYOUT)
            start = gl.load(query_start_loc + candidate, candidate < num_reqs, 0)
            started = (start // QUERIES <= tile - num_reqs) & (candidate < num_reqs)
            request += gl.sum(started.to(gl.int32), 0)
    return request


@gluon.jit
def _publish(scheduler, published, fields):
    """Publishes a tile to the other warps, once they have read the previous one in its slot."""
    tiles, full, empty = scheduler
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(empty.index(published % TILE_SLOTS), published // TILE_SLOTS & 1 ^ 1)
    for field in gl.static_range(len(fields)):
        tiles.index(published % TILE_SLOTS * TILE_FIELDS + field).store(gl.full([1], fields[field], gl.int32, ONE))
    mbarrier.arrive(full.index(published % TILE_SLOTS))


@gluon.jit
def await_tile(scheduler, taken):
    """Waits for the next tile. Returns the number of its queries: zero after the last tile."""
    _, full_tiles, _ = scheduler
    mbarrier.wait(full_tiles.index(taken % TILE_SLOTS), taken // TILE_SLOTS & 1)
    return read_tile(scheduler, taken, 0)


@gluon.jit
def read_tile(scheduler, taken, TILE_FIELD: gl.constexpr):
    """One of the numbers that were published."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tiles, _, _ = scheduler
    return gl.max(tiles.index(taken % TILE_SLOTS * TILE_FIELDS + TILE_FIELD).load(ONE), 0)


@gluon.jit
def _load_tile(
    cache, num_pages, boxes, full, empty, block_table, table_strides, loaded,
    num_queries, first_position, seq_len, head, request, split, splits,
    FIRST_COLUMN: gl.constexpr, BLOCK_SIZE: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Brings the blocks of a tile's split in step, box by box, and zeros in place of boxes beyond the last key.

    Returns the count of all blocks so far.
    """
    BOX_ROWS: gl.constexpr = cache.block_type.shape[2]
    pages = block_table + request.to(gl.int64) * table_strides[0]
    low, high, num_blocks, num_right, _ = blocks(first_position, num_queries, seq_len, BOX_ROWS, LEFT, RIGHT, BLOCK_N)
    first, last, _ = steps_of(split, splits, first_position, num_queries, seq_len, BOX_ROWS, LEFT, RIGHT, BLOCK_N)
    before = loaded - first
    for step in range(first, last):
        start = start_of(step, low, num_blocks, num_right, BLOCK_N)
        found = ()
        for row in gl.static_range(0, BLOCK_N, BOX_ROWS):
            place = pages + ((start + row) // BLOCK_SIZE).to(gl.int64) * table_strides[1]
            found += (gl.load(place, start + row < high, num_pages),)  # out of bounds of the descriptor: zeros
        stage, phase = (before + step) % STAGES, (before + step) // STAGES & 1
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), BLOCK_N * BLOCK_D * cache.dtype.primitive_bitwidth // 8)
        for column in gl.static_range(0, BLOCK_D, COLUMNS):
            for row in gl.static_range(0, BLOCK_N, BOX_ROWS):
                place = [found[row // BOX_ROWS], head, (start + row) % BLOCK_SIZE, FIRST_COLUMN + column]
                box = (stage * (BLOCK_D // COLUMNS) + column // COLUMNS) * (BLOCK_N // BOX_ROWS) + row // BOX_ROWS
                tma.async_copy_global_to_shared(cache, place, full.index(stage), boxes.index(box))
    return before + last


@gluon.jit
def steps_of(
    split, splits, first_position, num_queries, seq_len,
    BOX_ROWS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The steps first … last - 1 of one split of a tile, and how many splits the tile has. See `start_of` for steps."""
    num_splits, min_split_keys = splits
    _, high, origin, split_keys, num_used_splits = split_keys_of(
        first_position, num_queries, seq_len, num_splits, min_split_keys, LEFT, RIGHT, BOX_ROWS, BLOCK_N
    )
    num_blocks, num_steps = max(1, gl.cdiv(high - origin, BLOCK_N)), split_keys // BLOCK_N
    return split * num_steps, min(num_blocks, (split + 1) * num_steps), num_used_splits


@gluon.jit
def blocks(
    first_position, num_queries, seq_len,
    BOX_ROWS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Returns the range of keys that a tile attends, and its blocks.

    Queries of the tile see keys from low, the first row of a box, to high - 1. Then come the number of blocks, how many
    of the last blocks need a mask (at least one), and how many of all blocks need one.
    """
    last_position = first_position + num_queries - 1
    low, high = 0, seq_len
    if LEFT is not None:
        low = max(0, first_position - LEFT) // BOX_ROWS * BOX_ROWS
    if RIGHT is not None:
        high = min(high, last_position + RIGHT + 1)
    num_blocks = max(1, gl.cdiv(high - low, BLOCK_N))
    full_first, full_last = seen_by_all(low, high, first_position, last_position, LEFT, RIGHT, BLOCK_N)
    num_right = max(1, num_blocks - (full_last - low) // BLOCK_N)
    num_masked = num_right + min((full_first - low) // BLOCK_N, num_blocks - num_right)
    return low, high, num_blocks, num_right, num_masked


@gluon.jit
def start_of(step, low, num_blocks, num_right, BLOCK_N: gl.constexpr):
    """The first key of the block that is attended in this step.

    The last blocks, which need a mask, come first, from the end backwards; then all others from the first one on. So
    blocks without a mask are contiguous, and keys beyond the last one occur in step 0 alone.
    """
    return low + gl.where(step < num_right, num_blocks - 1 - step, step - num_right) * BLOCK_N
