"""Tiles of matrix products of many tokens on Hopper GPUs, and the warps that load them.

A persistent program takes one tile after the other, or a part of one. Its loading warps bring a stage of columns at a
time into a ring in shared memory: 128 bytes of each row of x, and the weights for them. The copy engine (TMA) brings
the weights, and the rows of a dense product. The rows of experts are gathered, which takes four warps.
"""

import functools
import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from vllm_opset.kernels.triton import INTERPRETED, _launch
from vllm_opset.kernels.triton._gluon import cp_async, tma_load
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._products.tiles import tile_of
from vllm_opset.targets import WGMMA

COPY_BYTES = 16  # TMA needs addresses and strides that are multiples of this.
# A stage has so many bytes of each row of x. That is the width of the swizzle of shared memory.
LINE = gl.constexpr(128)
OUTPUTS_OF_BOX = gl.constexpr(128)  # One copy brings so many rows of the weight.
# Registers of a thread. The first multiplying warpgroup gets what all others leave of 512 for each 128 threads.
MULTIPLYING_REGISTERS, LOADING_REGISTERS = gl.constexpr(232), gl.constexpr(40)
REGISTERS, MOST_REGISTERS = 1 << 16, 255  # of a multiprocessor, and of a thread
WARP = gl.constexpr(32)
GATHERING = gl.constexpr(128)  # Rows of experts are gathered by so many threads.


def available(device: torch.device) -> bool:
    """Whether kernels for Hopper GPUs run on a device."""
    return not INTERPRETED and WGMMA in _launch.target(device).features


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether the copy engine takes its address and strides."""
    *strides, last = tensor.stride()
    elements = COPY_BYTES // tensor.element_size()
    return last == 1 and tensor.data_ptr() % COPY_BYTES == 0 and math.gcd(elements, *strides) == elements


def most_registers(warps: int, programs: int) -> int:
    """The registers of a thread with which so many programs share a multiprocessor. Threads get multiples of eight."""
    return min(MOST_REGISTERS, REGISTERS // (warps * WARP.value * programs) // 8 * 8)


@functools.cache
def box_layout(swizzle: int, bits: int) -> NVMMASharedLayout:
    """The layout in shared memory of a TMA descriptor's boxes, of elements of so many bits.

    It is remembered, because Triton checks it whenever one is made.
    """
    return NVMMASharedLayout(swizzle, bits, rank=2)


@gluon.jit
def barriers(STAGES: gl.constexpr, COPYING: gl.constexpr, WARPGROUPS: gl.constexpr = 2):
    """Two barriers for each stage of a ring: it is full, and all multiplying warpgroups are done with it.

    COPYING: so many threads fill a stage beside the copy engine.
    """
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # The copy engine arrives, and each of these threads when its copies have.
        mbarrier.init(full.index(stage), count=1 + COPYING)
        mbarrier.init(empty.index(stage), count=WARPGROUPS)
    return full, empty


@gluon.jit
def turns():
    """A barrier for each of two warpgroups, which start their products in turn.

    Then the products of one run while the other does what comes between its own.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for warpgroup in gl.static_range(2):
        mbarrier.init(barriers.index(warpgroup), count=1)
    return barriers


@gluon.jit
def await_turn(barriers, number, INDEX: gl.constexpr):
    """Waits until the other warpgroup has started its product before this one. number: of this product, from 0 on."""
    mbarrier.wait(barriers.index(INDEX), number & 1 ^ 1 - INDEX)


@gluon.jit
def pass_turn(barriers, INDEX: gl.constexpr):
    """Lets the other warpgroup start its next product."""
    mbarrier.arrive(barriers.index(1 - INDEX))


@gluon.jit
def rows_of(tile, row, tiles, BLOCK_SIZE: gl.constexpr, TILES: gl.constexpr, ROWS: gl.constexpr):
    """The rows of the result that are the rows `row` of a tile: num_rows or more for none.

    tiles: sorted_token_ids, expert_ids, num_rows, the number of tiles of rows, top_k. Experts have TILES of them in a
    block of BLOCK_SIZE. Without expert_ids, rows are dense, and TILES is 1.
    """
    sorted_token_ids, expert_ids, num_rows, _, _ = tiles
    if expert_ids is None:
        return row + first_row_of(tile, num_rows, ROWS)
    else:
        row += tile % TILES * ROWS
        return gl.load(sorted_token_ids + tile // TILES * BLOCK_SIZE + row, row < BLOCK_SIZE, num_rows).to(gl.int32)


@gluon.jit
def expert_of(tile, tiles, TILES: gl.constexpr):
    """The expert of a tile, below 0 for an empty block. A dense product is that of expert 0."""
    if tiles[1] is None:
        return 0
    else:
        return gl.load(tiles[1] + tile // TILES).to(gl.int32)


@gluon.jit
def pieces_of_program(num_tiles, steps, schedule):
    """How many tiles a program takes, whole ones and at most one that it shares.

    steps: of a tile. schedule: whole and run of a `Schedule`, or None and None where no programs share tiles.
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    whole, run = schedule
    if run is None:
        return gl.cdiv(num_tiles - program, programs)
    else:
        has_part = program < (num_tiles - whole) * gl.cdiv(steps, run)
        return gl.cdiv(whole - program, programs) + gl.where(has_part, 1, 0)


@gluon.jit
def piece_of_program(number, steps, schedule):
    """A program's tile number `number`, its first step in this tile, and their end. See `pieces_of_program`."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    whole, run = schedule
    tile = program + number * programs
    if run is None:
        return tile, 0, steps
    else:
        sharing = gl.cdiv(steps, run)
        first, is_whole = program % sharing * run, tile < whole
        tile = gl.where(is_whole, tile, whole + program // sharing)
        return tile, gl.where(is_whole, 0, first), gl.where(is_whole, steps, gl.minimum(first + run, steps))


@gluon.jit
def first_row_of(tile, num_rows, ROWS: gl.constexpr):
    """The first row of a dense tile. The last of several ends with the last row, and repeats some of the one before.

    So it has no row that does not exist: `load_rows` says why.
    """
    return gl.minimum(tile * ROWS, gl.maximum(num_rows - ROWS, 0))


@gluon.jit
def load_rows(x, first_row, column, num_rows, barrier, place):
    """Fills `place` with rows of x from first_row on. x is a TMA descriptor, whose boxes may have fewer rows.

    The copy engine takes several times as long for a row that does not exist, some 4 ns on an H200. So a box without
    any that exists is a copy of the first box.
    """
    BOX: gl.constexpr = x.block_type.shape[0]
    gl.static_assert(place.shape[0] % BOX == 0, "boxes divide a tile's rows")
    for number in gl.static_range(place.shape[0] // BOX):
        row = first_row + number * BOX
        corner = [gl.where(row < num_rows, row, first_row), column]
        tma_load(x, corner, barrier, place.slice(number * BOX, BOX))


@gluon.jit
def load_tiles(
    x, x_stride, weight, ring, tiles,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILES: gl.constexpr,
    BOXES: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, scale_ring, scales,
    UNROLLED: gl.constexpr = 1, whole=None, run=None, PDL: gl.constexpr = False,
):  # fmt: skip
    """The loading warps: bring all tiles of a program. BOXES: of the weight in a tile.

    x is a TMA descriptor with boxes of some rows of a stage. Experts have a pointer instead. weight is a descriptor.
    scale_ring receives the scales by blocks of x and of the weight. It is empty if there are none.
    UNROLLED: a tile has a multiple of so many stages. whole, run: of a `Schedule`, see `pieces_of_program`.
    PDL: of a dense product. Its first weights are loaded before the wait, since the kernel before does not write them.
    """
    x_ring, w_ring, full, empty = ring
    expert_ids, num_rows, num_tiles, top_k = tiles[1], tiles[2], tiles[3], tiles[4]
    ROWS: gl.constexpr = x_ring.shape[1]
    WIDTH: gl.constexpr = x_ring.shape[2]
    W_WIDTH: gl.constexpr = w_ring.shape[2]
    W_BYTES: gl.constexpr = BOXES * OUTPUTS_OF_BOX * W_WIDTH * w_ring.dtype.primitive_bitwidth // 8
    STAGE_BYTES: gl.constexpr = W_BYTES + (ROWS * LINE if expert_ids is None else 0)
    GATHER: gl.constexpr = gl.BlockedLayout([1, WIDTH // 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    TILE_OUTPUTS: gl.constexpr = BOXES * OUTPUTS_OF_BOX
    NUM_COLUMNS: gl.constexpr = -(-OUTPUTS // TILE_OUTPUTS)
    steps = UNROLLED * gl.cdiv(COLUMNS, UNROLLED * WIDTH)
    loaded, ahead, schedule = 0, 0, (whole, run)
    if PDL:
        index, first_step, end_step = piece_of_program(0, steps, schedule)
        _, column = tile_of(index, num_tiles, NUM_COLUMNS, GROUP)
        ahead = gl.minimum(STAGES, end_step - first_step)
        for stage in range(ahead):
            _load_weight(weight, ring, stage, column * TILE_OUTPUTS, (first_step + stage) * W_WIDTH, BOXES, STAGE_BYTES)
        pdl_wait(PDL)
    for number in range(pieces_of_program(num_tiles * NUM_COLUMNS, steps, schedule)):
        index, first_step, end_step = piece_of_program(number, steps, schedule)
        tile, column = tile_of(index, num_tiles, NUM_COLUMNS, GROUP)
        expert = expert_of(tile, tiles, TILES)
        first_output = expert * OUTPUTS + column * TILE_OUTPUTS
        if expert_ids is not None:
            choice = rows_of(tile, gl.arange(0, ROWS, gl.SliceLayout(1, GATHER)), tiles, BLOCK_SIZE, TILES, ROWS)
            place = gl.arange(0, WIDTH, gl.SliceLayout(0, GATHER))
            pointers = x + (choice // top_k).to(gl.int64)[:, None] * x_stride + place[None, :]
            is_choice = (choice < num_rows)[:, None]
        if len(scale_ring) > 0:
            scale_pointers = _scales_of(
                tile, expert, column, tiles, scales, scale_ring, OUTPUTS, BLOCK_SIZE, TILES, ROWS
            )
        for step in range(first_step, gl.where(expert < 0, first_step, end_step)):
            stage = loaded % STAGES
            if loaded >= ahead:
                mbarrier.wait(empty.index(stage), loaded // STAGES & 1 ^ 1)
                _load_weight(weight, ring, stage, first_output, step * W_WIDTH, BOXES, STAGE_BYTES)
            if expert_ids is None:
                first_row = first_row_of(tile, num_rows, ROWS)
                load_rows(x, first_row, step * WIDTH, num_rows, full.index(stage), x_ring.index(stage))
            else:
                inside = is_choice & (step * WIDTH + place < COLUMNS)[None, :]
                cp_async(x_ring.index(stage), pointers + step * WIDTH, inside)
            if len(scale_ring) > 0:
                _load_scales(scale_pointers, scales, scale_ring, step, stage)
            if expert_ids is not None or len(scale_ring) > 0:
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            loaded += 1


@gluon.jit
def _load_weight(weight, ring, stage, first_output, column, BOXES: gl.constexpr, STAGE_BYTES: gl.constexpr):
    """Lets a stage's barrier await all its bytes, and brings those of the weight."""
    _, w_ring, full, _ = ring
    mbarrier.expect(full.index(stage), STAGE_BYTES)
    for box in gl.static_range(BOXES):
        corner = [first_output + box * OUTPUTS_OF_BOX, column]
        tma_load(weight, corner, full.index(stage), w_ring.index(stage * BOXES + box))


@gluon.jit
def _scales_of(
    tile, expert, column, tiles, scales, scale_ring,
    OUTPUTS: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Pointers to the scales of a tile's first columns by blocks, for its rows of x and its boxes of the weight."""
    weight_scale, ws_expert, ws_row, _, x_scale, xs_row, _ = scales
    BOXES: gl.constexpr = scale_ring[1].shape[1]
    ONE: gl.constexpr = gl.BlockedLayout([1], [WARP], [gl.num_warps()], [0])
    choice = rows_of(tile, gl.arange(0, scale_ring[0].shape[1], ONE), tiles, BLOCK_SIZE, TILES, ROWS)
    of_x = gl.minimum(choice, tiles[2] - 1) // tiles[4] * xs_row
    block = gl.minimum(column * BOXES + gl.arange(0, BOXES, ONE), gl.cdiv(OUTPUTS, OUTPUTS_OF_BOX) - 1)
    return x_scale + of_x, weight_scale + expert * ws_expert + block * ws_row


@gluon.jit
def _load_scales(pointers, scales, scale_ring, step, stage):
    """Copies those of a stage. OUTPUTS_OF_BOX, and the columns of a stage, are a block's."""
    _, _, _, ws_column, _, _, xs_column = scales
    of_x, of_weight = scale_ring
    cp_async(of_x.index(stage), pointers[0] + step * xs_column)
    cp_async(of_weight.index(stage), pointers[1] + step * ws_column)
