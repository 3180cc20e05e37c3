"""The widening warps of prefill_sm90: they convert the values of an fp8 cache to fp16, in which wgmma multiplies them.

Instructions for fp8 take a block's keys as they lie in the cache, but would need its values transposed. The loading
warp brings values into a ring of their own in shared memory. From there, each of two warps stores half of a block in
fp16 into the ring of the attending warpgroups, while these attend the blocks before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from vllm_opset.kernels.triton.paged_attention._load_sm90 import TILE_SLOTS, await_tile, blocks, read_tile, steps_of

UNIT = gl.constexpr(8)  # numbers that a thread converts at a time: 8 bytes in fp8, and 16 in fp16
WARP = gl.constexpr(32)
WIDENING_WARPS = gl.constexpr(2)


@gluon.jit
def widen_tiles(
    PART: gl.constexpr, rings, scheduler, split_blocks,
    ELEMENTS: gl.constexpr, BOX_ROWS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """Converts one warp's part of the values of each tile that is published, up to one without queries.

    rings: see `_widen`. ELEMENTS: so many are loaded before they are stored, so that their latencies overlap.
    """
    BLOCK_N: gl.constexpr = rings[3].shape[1]
    empty_tiles = scheduler[2]
    taken, done = 0, 0  # counts of tiles and of blocks
    num_queries = await_tile(scheduler, taken)
    while num_queries > 0:
        first_position, seq_len = read_tile(scheduler, taken, 2), read_tile(scheduler, taken, 3)
        split = read_tile(scheduler, taken, 6)
        mbarrier.arrive(empty_tiles.index(taken % TILE_SLOTS))
        _, _, num_blocks, _, _ = blocks(first_position, num_queries, seq_len, BOX_ROWS, LEFT, RIGHT, BLOCK_N)
        first, last = steps_of(split, split_blocks, num_blocks)
        for at in range(done, done + last - first):
            _widen(PART, rings, at, ELEMENTS)
        done += last - first
        taken += 1
        num_queries = await_tile(scheduler, taken)


@gluon.jit
def _widen(PART: gl.constexpr, rings, at, ELEMENTS: gl.constexpr):
    """Converts a part of the block `at` of all, once it is loaded and its place in the other ring is free."""
    loaded_ring, full_loaded, empty_loaded, ring, full, empty = rings
    LOADED_STAGES: gl.constexpr = loaded_ring.shape[0]
    STAGES: gl.constexpr = ring.shape[0]
    PART_ROWS: gl.constexpr = ring.shape[1] // WIDENING_WARPS
    BLOCK_D: gl.constexpr = ring.shape[2]
    ROWS: gl.constexpr = min(PART_ROWS, ELEMENTS // BLOCK_D)
    THREADS: gl.constexpr = BLOCK_D // UNIT  # of a row
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, UNIT], [WARP // THREADS, THREADS], [1, 1], [1, 0])
    mbarrier.wait(full_loaded.index(at % LOADED_STAGES), at // LOADED_STAGES & 1)
    mbarrier.wait(empty.index(at % STAGES), at // STAGES & 1 ^ 1)
    for row in gl.static_range(PART * PART_ROWS, (PART + 1) * PART_ROWS, ROWS):
        rows = loaded_ring.index(at % LOADED_STAGES).slice(row, ROWS).load(LAYOUT)
        ring.index(at % STAGES).slice(row, ROWS).store(rows.to(ring.dtype))
    hopper.fence_async_shared()
    mbarrier.arrive(empty_loaded.index(at % LOADED_STAGES))
    mbarrier.arrive(full.index(at % STAGES))
