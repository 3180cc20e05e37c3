"""Products of many rows in fp8 on Hopper GPUs, dense and of experts, specialised by warps.

While loading warps (`load_sm90`) bring 128 columns at a time, two warpgroups multiply 64 rows each, or half of the
outputs of the same 64 rows. By blocks, each product of 128 columns starts from zero, and is multiplied by its scales
and added in fp32 while the other warpgroup's products run. A warpgroup with one product for each stage starts those of
two stages at once. By rows, tensor cores add the products. They keep some 14 bits of a sum, as `grouped_gemm.scaled`
says.

Several programs may share each of the last tiles of a dense product, so that fewer multiprocessors have nothing to do
at the end. The last program of a tile adds their sums, always in the same order. The kernel that shares tiles has more
code, and by blocks its products of a stage take some 1.1 to 1.2 times as long.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from vllm_opset.kernels.triton._gluon import tma_store
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._products.load_sm90 import (
    LOADING_REGISTERS,
    MULTIPLYING_REGISTERS,
    WARP,
    await_turn,
    barriers,
    expert_of,
    first_row_of,
    load_tiles,
    pass_turn,
    piece_of_program,
    pieces_of_program,
    rows_of,
    turns,
)
from vllm_opset.kernels.triton._products.shared_tiles import sums_of_tile
from vllm_opset.kernels.triton._products.tiles import tile_of

# A stage has so many columns, and a product so many outputs. Those of a block of scales are as many.
WIDTH = gl.constexpr(128)
HALF = gl.constexpr(64)  # A product has so many rows.


@gluon.jit(do_not_specialize=["num_rows", "num_tiles", "whole", "run"])
def scaled_gemm_sm90(
    x, x_stride, weight, bias, out, last_out, weight_scale, ws_expert, ws_row, ws_column, x_scale, xs_row, xs_column,
    sorted_token_ids, expert_ids, num_rows, num_tiles, top_k, partials, counters, whole, run,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, BY_BLOCKS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILES: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    COPIED_RESULTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Programs take tiles by turns, or share them. At most as many are launched as run at a time.

    whole, run: see `Schedule`. partials, counters: see `sums_of_tile`. All are None for a kernel that shares no tiles.
    x is a TMA descriptor with boxes [ROWS or fewer, WIDTH]. Experts have a pointer instead. weight is a descriptor with
    boxes [WIDTH, WIDTH]. out has num_rows rows, and is a pointer. With COPIED_RESULTS, out and last_out are descriptors
    with boxes [HALF, WIDTH]: of the rows before the last tile's, and of all rows.
    ROWS is that of a tile: one or two HALFs. PARTS is the number of a warpgroup's products, of WIDTH outputs each.
    For experts, there are TILES tiles in a block of BLOCK_SIZE.
    """
    if expert_ids is not None:
        pdl_wait(PDL)
    BOX: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    OUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    TILE_PARTS: gl.constexpr = PARTS * 2 * HALF // ROWS
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, WIDTH], BOX)
    w_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * TILE_PARTS, WIDTH, WIDTH], BOX)
    out_dtype: gl.constexpr = out.dtype if COPIED_RESULTS else out.dtype.element_ty
    staging = gl.allocate_shared_memory(out_dtype, [2, HALF, WIDTH], OUT)
    LOADERS: gl.constexpr = 1 if expert_ids is None else 4
    scale_ring = ()
    if BY_BLOCKS:
        LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        of_x = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], LINE)
        scale_ring = (of_x, gl.allocate_shared_memory(gl.float32, [STAGES, TILE_PARTS], LINE))
    COPYING: gl.constexpr = LOADERS * WARP if BY_BLOCKS or expert_ids is not None else 0
    full, empty = barriers(STAGES, COPYING)
    ring, in_turn = (x_ring, w_ring, full, empty), turns()
    tiles = (sorted_token_ids, expert_ids, num_rows, num_tiles, top_k)
    scales = (weight_scale, ws_expert, ws_row, ws_column, x_scale, xs_row, xs_column)
    outs, sums = (out, last_out), (partials, counters)
    schedule = (whole, run)
    # The loading warp of a dense product brings weights before it waits, so each partition waits by itself.
    DENSE_PDL: gl.constexpr = PDL if expert_ids is None else False
    gl.warp_specialize(
        [
            (_multiply, (0, ring, in_turn, scale_ring, staging, tiles, scales, bias, outs, sums, schedule, OUTPUTS,
                         COLUMNS, BLOCK_SIZE, TILES, ROWS, PARTS, GROUP, COPIED_RESULTS, DENSE_PDL)),
            (_multiply, (1, ring, in_turn, scale_ring, staging, tiles, scales, bias, outs, sums, schedule, OUTPUTS,
                         COLUMNS, BLOCK_SIZE, TILES, ROWS, PARTS, GROUP, COPIED_RESULTS, DENSE_PDL)),
            (load_tiles, (x, x_stride, weight, ring, tiles, OUTPUTS, COLUMNS, BLOCK_SIZE, TILES, TILE_PARTS, GROUP,
                          STAGES, scale_ring, scales, 1, whole, run, DENSE_PDL)),
        ],
        [4, LOADERS],
        [MULTIPLYING_REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _multiply(
    INDEX: gl.constexpr, ring, in_turn, scale_ring, staging, tiles, scales, bias, outs, shared_sums, schedule,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILES: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr,
    COPIED_RESULTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The products of one of two warpgroups: half of the rows of each tile, or of its outputs if it has 64 rows.

    scale_ring: of the scales by blocks, which the loading warps bring, or empty by rows.
    shared_sums: partials and counters of `sums_of_tile`. schedule: see `pieces_of_program`.
    """
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    BY_BLOCKS: gl.constexpr = len(scale_ring) > 0
    FIRST_ROW: gl.constexpr = INDEX * HALF if ROWS > HALF else 0
    FIRST_PART: gl.constexpr = INDEX * PARTS if ROWS == HALF else 0
    TILE_PARTS: gl.constexpr = PARTS * 2 * HALF // ROWS
    NUM_COLUMNS: gl.constexpr = -(-OUTPUTS // (TILE_PARTS * WIDTH))
    x_ring, w_ring, full, empty = ring
    _, expert_ids, num_rows, num_tiles, top_k = tiles
    weight_scale, ws_expert, ws_row, _, x_scale, xs_row, _ = scales
    out, last_out = outs
    partials, counters = shared_sums
    whole, run = schedule
    row = FIRST_ROW + gl.arange(0, HALF, gl.SliceLayout(1, ACC))
    steps = gl.cdiv(COLUMNS, WIDTH)
    # Registers hold two products at a time. With several parts, the next one starts after the last one is added.
    AT_ONCE: gl.constexpr = 2 if BY_BLOCKS and PARTS == 1 else 1
    TURNS: gl.constexpr = PARTS if BY_BLOCKS else 1
    GATHERED: gl.constexpr = expert_ids is not None
    operands = (x_ring, w_ring, full, empty, scale_ring, in_turn)
    done, turn = 0, 0
    pdl_wait(PDL)
    for number in range(pieces_of_program(num_tiles * NUM_COLUMNS, steps, schedule)):
        index, first_step, end_step = piece_of_program(number, steps, schedule)
        tile, column = tile_of(index, num_tiles, NUM_COLUMNS, GROUP)
        expert = expert_of(tile, tiles, TILES)
        first_output = (column * TILE_PARTS + FIRST_PART) * WIDTH
        choice = rows_of(tile, row, tiles, BLOCK_SIZE, TILES, ROWS)
        of_rows = gl.minimum(choice, num_rows - 1) // top_k * xs_row
        sums = (gl.zeros([HALF, WIDTH], gl.float32, ACC),) * PARTS
        num_steps = gl.where(expert < 0, 0, end_step - first_step)
        for _ in range(num_steps // AT_ONCE):
            sums = _add(INDEX, sums, operands, done, turn, FIRST_ROW, FIRST_PART, TILE_PARTS, GATHERED, AT_ONCE)
            done, turn = done + AT_ONCE, turn + TURNS
        if AT_ONCE > 1 and num_steps % AT_ONCE > 0:
            sums = _add(INDEX, sums, operands, done, turn, FIRST_ROW, FIRST_PART, TILE_PARTS, GATHERED, 1)
            done, turn = done + 1, turn + TURNS
        is_last = expert >= 0  # an empty block has no results
        if run is not None:
            is_shared = index >= whole
            # A whole tile counts as a single unit, which one program has. Each other tile begins with a program.
            shared, units = gl.where(is_shared, index - whole, 0), gl.where(is_shared, gl.cdiv(steps, run) * run, 1)
            is_last, sums = sums_of_tile(sums, partials, counters, shared, units, run, INDEX, 2)
        if is_last:
            for part in gl.static_range(PARTS):
                output = first_output + part * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, ACC))
                y, is_output = sums[part], output < OUTPUTS
                if not BY_BLOCKS:
                    y *= gl.load(weight_scale + expert * ws_expert + output * ws_row, is_output, 0.0)[None, :]
                    y *= gl.load(x_scale + of_rows, choice < num_rows, 0.0)[:, None]
                if bias is not None:
                    y += gl.load(bias + expert * OUTPUTS + output, is_output, 0.0).to(gl.float32)[None, :]
                if COPIED_RESULTS:
                    tma.store_wait(0)  # of the part before
                    staging.index(INDEX).store(y.to(out.dtype))
                    hopper.fence_async_shared()
                    corner = [first_row_of(tile, num_rows, ROWS) + FIRST_ROW, first_output + part * WIDTH]
                    if tile < num_tiles - 1:
                        tma_store(out, corner, staging.index(INDEX))
                    else:
                        tma_store(last_out, corner, staging.index(INDEX))
                else:
                    _store(
                        y, staging.index(INDEX), out, tile, FIRST_ROW, first_output + part * WIDTH, tiles,
                        OUTPUTS, BLOCK_SIZE, TILES, ROWS,
                    )  # fmt: skip
    if COPIED_RESULTS:
        tma.store_wait(0)


@gluon.jit
def _add(
    INDEX: gl.constexpr, sums, operands, done, turn, FIRST_ROW: gl.constexpr, FIRST_PART: gl.constexpr,
    TILE_PARTS: gl.constexpr, GATHERED: gl.constexpr, NUMBER: gl.constexpr,
):  # fmt: skip
    """Adds the products of NUMBER stages. done: the stages before. turn: the turns before.

    GATHERED: threads have written the rows of x.
    """
    _, _, _, _, scale_ring, _ = operands
    if len(scale_ring) == 0:
        return _add_unscaled(INDEX, sums, operands, done, turn, FIRST_ROW, FIRST_PART, TILE_PARTS, GATHERED)
    elif len(sums) == 1:
        return _add_stages(INDEX, sums, operands, done, turn, FIRST_ROW, FIRST_PART, TILE_PARTS, GATHERED, NUMBER)
    else:
        return _add_parts(INDEX, sums, operands, done, turn, FIRST_ROW, FIRST_PART, TILE_PARTS, GATHERED)


@gluon.jit
def _stage_of(operands, done, GATHERED: gl.constexpr):
    """Waits until stage number `done` is full, and returns its place in the ring."""
    _, _, full, _, _, _ = operands
    STAGES: gl.constexpr = full.shape[0]
    stage = done % STAGES
    mbarrier.wait(full.index(stage), done // STAGES & 1)
    if GATHERED:
        hopper.fence_async_shared()  # wgmma reads them
    return stage


@gluon.jit
def _add_stages(
    INDEX: gl.constexpr, sums, operands, done, turn, FIRST_ROW: gl.constexpr, FIRST_PART: gl.constexpr,
    TILE_PARTS: gl.constexpr, GATHERED: gl.constexpr, NUMBER: gl.constexpr,
):  # fmt: skip
    """By blocks, one part: the products of NUMBER stages start in one turn. While one is added, the next one runs."""
    x_ring, w_ring, _, empty, scale_ring, in_turn = operands
    ACC: gl.constexpr = sums[0].type.layout
    STAGES: gl.constexpr = x_ring.shape[0]
    zeros = gl.zeros([HALF, WIDTH], gl.float32, ACC)
    await_turn(in_turn, turn, INDEX)
    products = ()
    for number in gl.static_range(NUMBER):
        stage = _stage_of(operands, done + number, GATHERED)
        x = x_ring.index(stage).slice(FIRST_ROW, HALF)
        w = w_ring.index(stage * TILE_PARTS + FIRST_PART).permute((1, 0))
        products += (hopper.warpgroup_mma(x, w, zeros, use_acc=False, is_async=True),)
    pass_turn(in_turn, INDEX)
    total = sums[0]
    for number in gl.static_range(NUMBER):
        stage = (done + number) % STAGES
        of_x, of_weight = _scales_at(scale_ring, stage, FIRST_ROW, FIRST_PART, 1, ACC)
        product = hopper.warpgroup_mma_wait(NUMBER - 1 - number, deps=(products[number],))
        mbarrier.arrive(empty.index(stage))
        total += product * (of_x * of_weight)[:, None]
    return (total,)


@gluon.jit
def _add_parts(
    INDEX: gl.constexpr, sums, operands, done, turn, FIRST_ROW: gl.constexpr, FIRST_PART: gl.constexpr,
    TILE_PARTS: gl.constexpr, GATHERED: gl.constexpr,
):  # fmt: skip
    """By blocks, several parts of a stage: each has a turn, and is added before the next one starts."""
    x_ring, w_ring, _, empty, scale_ring, in_turn = operands
    ACC: gl.constexpr = sums[0].type.layout
    PARTS: gl.constexpr = len(sums)
    stage = _stage_of(operands, done, GATHERED)
    scales = _scales_at(scale_ring, stage, FIRST_ROW, FIRST_PART, PARTS, ACC)
    x, zeros = x_ring.index(stage).slice(FIRST_ROW, HALF), gl.zeros([HALF, WIDTH], gl.float32, ACC)
    added = ()
    for part in gl.static_range(PARTS):
        await_turn(in_turn, turn + part, INDEX)
        w = w_ring.index(stage * TILE_PARTS + FIRST_PART + part).permute((1, 0))
        product = hopper.warpgroup_mma(x, w, zeros, use_acc=False, is_async=True)
        pass_turn(in_turn, INDEX)
        product = hopper.warpgroup_mma_wait(0, deps=(product,))
        if part == PARTS - 1:
            mbarrier.arrive(empty.index(stage))
        total = sums[part] + product * (scales[0] * scales[1 + part])[:, None]
        if part < PARTS - 1:  # now: registers do not hold the next product too
            total = hopper.warpgroup_mma_wait(0, deps=(total,))
        added += (total,)
    return added


@gluon.jit
def _add_unscaled(
    INDEX: gl.constexpr, sums, operands, done, turn, FIRST_ROW: gl.constexpr, FIRST_PART: gl.constexpr,
    TILE_PARTS: gl.constexpr, GATHERED: gl.constexpr,
):  # fmt: skip
    """By rows: tensor cores add the products of a stage."""
    x_ring, w_ring, _, empty, _, in_turn = operands
    stage = _stage_of(operands, done, GATHERED)
    x = x_ring.index(stage).slice(FIRST_ROW, HALF)
    await_turn(in_turn, turn, INDEX)
    added = ()
    for part in gl.static_range(len(sums)):
        w = w_ring.index(stage * TILE_PARTS + FIRST_PART + part).permute((1, 0))
        added += (hopper.warpgroup_mma(x, w, sums[part], is_async=True),)
    pass_turn(in_turn, INDEX)
    waited = hopper.warpgroup_mma_wait(0, deps=added)
    mbarrier.arrive(empty.index(stage))
    return (waited,) if len(sums) == 1 else waited


@gluon.jit
def _scales_at(
    scale_ring, stage, FIRST_ROW: gl.constexpr, FIRST_PART: gl.constexpr, PARTS: gl.constexpr, ACC: gl.constexpr
):
    """The scales of a stage's rows of x, and of its weights for each part. These are tensors of one element."""
    of_x, of_weight = scale_ring
    found = (of_x.index(stage).slice(FIRST_ROW, HALF).load(gl.SliceLayout(1, ACC)),)
    for part in gl.static_range(PARTS):
        found += (of_weight.index(stage).slice(FIRST_PART + part, 1).load(gl.SliceLayout(1, ACC)),)
    return found


@gluon.jit
def _store(
    y, staging, out, tile, FIRST_ROW: gl.constexpr, first_output, tiles,
    OUTPUTS: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Writes a product's results in whole lines, by way of shared memory."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    staging.store(y.to(staging.dtype))
    row = FIRST_ROW + gl.arange(0, HALF, gl.SliceLayout(1, LINES))
    choice = rows_of(tile, row, tiles, BLOCK_SIZE, TILES, ROWS)
    output = first_output + gl.arange(0, WIDTH, gl.SliceLayout(0, LINES))
    inside = (choice < tiles[2])[:, None] & (output < OUTPUTS)[None, :]
    if tiles[1] is None:  # The last tile has these rows, too. Its programs may have other sums.
        inside &= (choice < tiles[2] - ROWS)[:, None] | (tile == tiles[3] - 1)
    gl.store(out + choice.to(gl.int64)[:, None] * OUTPUTS + output[None, :], staging.load(LINES), inside)
