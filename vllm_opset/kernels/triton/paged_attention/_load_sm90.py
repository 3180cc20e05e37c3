"""The loading warps of prefill_sm90: the tile scheduler, and the loads of keys and values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from vllm_opset.kernels.triton._gluon import tma_load
from vllm_opset.kernels.triton._products.load_sm90 import LINE
from vllm_opset.kernels.triton.paged_attention._plan_sm90 import ITEM_FIELDS, keys_of
from vllm_opset.kernels.triton.paged_attention._tile import seen_by_all

WARPGROUP_ROWS = gl.constexpr(64)  # of a query tile, and so of each wgmma instruction of the warpgroup
TILE_SLOTS = gl.constexpr(2)  # published tiles that fit shared memory
TILE_FIELDS = gl.constexpr(8)  # numbers that describe a tile
SMALL_HEAD = 64


@gluon.constexpr_function
def attending_warpgroups(block_d):
    """Three for small heads, whose softmax takes longer than their products. For others, registers suffice for two."""
    return 3 if block_d <= SMALL_HEAD else 2


@gluon.constexpr_function
def rows_of_tile(block_d):
    """The rows of a query tile: queries times query heads of a KV head."""
    return attending_warpgroups(block_d) * WARPGROUP_ROWS.value


@gluon.constexpr_function
def box_columns(block_d, bits):
    """The columns of a box of numbers of so many bits."""
    return min(block_d, LINE.value * 8 // bits)


@gluon.constexpr_function
def cache_layout(block_d, bits, rank):
    """How boxes lie in shared memory, and blocks of boxes: boxes of rows, then the next columns."""
    return gl.NVMMASharedLayout(box_columns(block_d, bits) * bits // 8, bits, rank=rank)


@gluon.jit
def load_keys(
    source,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Draws items of the plan, each for one KV head after the other, publishes them and loads their keys."""
    (
        cache, num_pages, boxes, full, empty, scheduler, batch, items, num_items, split_blocks, most_partials, ticket,
    ) = source  # fmt: skip
    query_start_loc, seq_lens, block_table, table_strides = batch
    published, loaded = 0, 0  # counts of tiles and of key blocks
    drawn = gl.program_id(0)
    while drawn < num_items * NUM_KV_HEADS:
        head, item = drawn % NUM_KV_HEADS, drawn // NUM_KV_HEADS
        place = items + item * ITEM_FIELDS
        request, first_query, split = gl.load(place), gl.load(place + 1), gl.load(place + 2)
        partial = head * most_partials + gl.load(place + 3)
        first_token, seq_len = gl.load(query_start_loc + request), gl.load(seq_lens + request)
        query_len = gl.load(query_start_loc + request + 1) - first_token
        num_queries = min(rows_of_tile(BLOCK_D) // GROUP, query_len - first_query)
        first_position = seq_len - query_len + first_query
        _publish(
            scheduler, published,
            (num_queries, first_token + first_query, first_position, seq_len, head, request, split, partial),
        )  # fmt: skip
        published += 1
        loaded = _load_tile(
            cache, num_pages, boxes, full, empty, block_table, table_strides, loaded,
            num_queries, first_position, seq_len, head, request, split, split_blocks,
            0, BLOCK_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D, STAGES,
        )  # fmt: skip
        number = gl.atomic_add(ticket, 1)
        if number == num_items * NUM_KV_HEADS - 1:  # the last draw of all: each program's last one finds no item
            gl.store(ticket, 0)
        drawn = gl.num_programs(0) + number
    _publish(scheduler, published, (0,))


@gluon.jit
def load_values(
    source,
    HEAD_SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Brings the values of each tile that is published, up to one without queries."""
    cache, num_pages, boxes, full, empty, scheduler, block_table, table_strides, split_blocks = source
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
            num_queries, first_position, seq_len, head, request, split, split_blocks,
            HEAD_SIZE, BLOCK_SIZE, LEFT, RIGHT, BLOCK_N, BLOCK_D, STAGES,
        )  # fmt: skip
        taken += 1
        num_queries = await_tile(scheduler, taken)


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
    num_queries, first_position, seq_len, head, request, split, split_blocks,
    FIRST_COLUMN: gl.constexpr, BLOCK_SIZE: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Brings the blocks of a tile's split in step, box by box, and zeros in place of boxes beyond the last key.

    Returns the count of all blocks so far.
    """
    BOX_ROWS: gl.constexpr = cache.block_type.shape[2]
    COLUMNS: gl.constexpr = cache.block_type.shape[3]
    pages = block_table + request.to(gl.int64) * table_strides[0]
    low, high, num_blocks, num_right, _ = blocks(first_position, num_queries, seq_len, BOX_ROWS, LEFT, RIGHT, BLOCK_N)
    first, last = steps_of(split, split_blocks, num_blocks)
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
                tma_load(cache, place, full.index(stage), boxes.index(box))
    return before + last


@gluon.jit
def steps_of(split, split_blocks, num_blocks):
    """The steps first … last - 1 of one split of a tile. See `start_of` for steps."""
    return split * split_blocks, min(num_blocks, (split + 1) * split_blocks)


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
    low, high = keys_of(first_position, num_queries, seq_len, BOX_ROWS, LEFT, RIGHT)
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
