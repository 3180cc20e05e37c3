"""linear for some tokens on Hopper GPUs: `decode_sm90` with a loading warp and two warpgroups that share x.

x is read once for each tile of the weight. With 64 tokens and tiles of 64 rows, the second-level cache passes on as
many bytes of x as of the weight. Tiles of 128 or 256 rows need a half or a quarter of them. While one warpgroup waits
for its products or adds them, those of the other one run. Loads wait for neither.

The scales of a unit come through the ring as well, so they are there when its products are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from vllm_opset.kernels.triton._gluon import cp_async
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._products.load_sm90 import LINE, LOADING_REGISTERS, MULTIPLYING_REGISTERS, WARP, barriers
from vllm_opset.kernels.triton._products.scaled_gemm_sm90 import HALF
from vllm_opset.kernels.triton._products.scaled_gemm_sm90 import WIDTH as BLOCK
from vllm_opset.kernels.triton.linear._decode_tiles_sm90 import (
    SUM_BYTES,
    UNSPECIALISED,
    add,
    add_scaled,
    finish,
    load_weight,
    load_x,
    parts_of_tile,
)

WARPGROUPS, WARPS = gl.constexpr(2), 4  # that multiply, and of each of them


@gluon.jit(**UNSPECIALISED)
def wide_decode_sm90(
    x, weight, bias, out, weight_scale, ws_row, ws_column, x_scale, xs_row, xs_column, partials, counters,
    num_tokens, num_outputs, num_blocks, tile_units, num_units, run, token_tiles,
    BY_BLOCKS: gl.constexpr, LINES: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Arguments are those of `decode_sm90`. Each warpgroup has one or two products of HALF rows for a line."""
    ROWS: gl.constexpr = weight.block_type.shape[0]
    TOKENS: gl.constexpr = x.block_type.shape[0]
    WIDTH: gl.constexpr = x.block_type.shape[1]
    w_ring = gl.allocate_shared_memory(weight.dtype, [STAGES * LINES, ROWS, WIDTH], weight.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES * LINES, TOKENS, WIDTH], x.layout)
    scale_ring = ()
    if BY_BLOCKS:
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        of_x = gl.allocate_shared_memory(gl.float32, [STAGES * LINES, TOKENS], PLAIN)
        scale_ring = (of_x, gl.allocate_shared_memory(gl.float32, [STAGES * LINES, ROWS // BLOCK], PLAIN))
    full, empty = barriers(STAGES, WARP if BY_BLOCKS else 0, WARPGROUPS)
    ring = (w_ring, x_ring, full)
    scales = (weight_scale, ws_row, ws_column, x_scale, xs_row, xs_column)
    sizes = (num_tokens, num_outputs, num_blocks, tile_units, run, token_tiles)
    begin = gl.program_id(0) * run
    units = (begin, gl.minimum(begin + run, num_units))
    results = (bias, out, partials, counters)
    gl.warp_specialize(
        [
            (_multiply, (0, ring, empty, scale_ring, units, scales, sizes, results, LINES, STAGES, PDL)),
            (_multiply, (1, ring, empty, scale_ring, units, scales, sizes, results, LINES, STAGES, PDL)),
            (_load, (x, weight, ring, empty, scale_ring, units, scales, sizes, LINES, STAGES, PDL)),
        ],
        [4, 1],
        [MULTIPLYING_REGISTERS, LOADING_REGISTERS],
    )


@gluon.jit
def _multiply(
    INDEX: gl.constexpr, ring, empty, scale_ring, units, scales, sizes, results,
    LINES: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The products of one warpgroup, for its part of the rows of each tile."""
    w_ring, x_ring, full = ring
    bias, out, partials, counters = results
    begin, end = units
    tile_units = sizes[3]
    TOKENS: gl.constexpr = x_ring.shape[1]
    PARTS: gl.constexpr = w_ring.shape[1] // (WARPGROUPS * HALF)
    BY_BLOCKS: gl.constexpr = len(scale_ring) > 0
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, SUM_BYTES * x_ring.shape[2] // LINE])
    pdl_wait(PDL)
    done = 0
    for tile in range(begin // tile_units, gl.cdiv(end, tile_units)):
        sums = (gl.zeros([HALF, TOKENS], gl.float32, SUMS),) * PARTS
        for _ in range(gl.minimum(end, (tile + 1) * tile_units) - gl.maximum(begin, tile * tile_units)):
            stage = done % STAGES
            mbarrier.wait(full.index(stage), done // STAGES & 1)
            if BY_BLOCKS:
                of_unit = _copied_scales(scale_ring, stage, INDEX * PARTS * HALF // BLOCK, LINES, SUMS)
                sums = add_scaled(sums, of_unit, w_ring, x_ring, stage, INDEX * PARTS * HALF, LINES)
            else:
                sums = add(sums, w_ring, x_ring, stage, INDEX * PARTS * HALF, LINES)
            mbarrier.arrive(empty.index(stage))
            done += 1
        finish(sums, scales, bias, out, partials, counters, tile, sizes, BY_BLOCKS, INDEX, WARPGROUPS)


@gluon.jit
def _copied_scales(scale_ring, stage, ROW_BLOCK: gl.constexpr, LINES: gl.constexpr, SUMS: gl.constexpr):
    """The scales of each line of a stage: those of x, and that of the weight for one of a tile's blocks of rows."""
    of_x, of_weight = scale_ring
    found = ()
    for line in gl.static_range(LINES):
        found += (of_x.index(stage * LINES + line).load(gl.SliceLayout(0, SUMS)),)
        found += (of_weight.index(stage * LINES + line).slice(ROW_BLOCK, 1).load(gl.SliceLayout(0, SUMS)),)
    return found


@gluon.jit
def _load(
    x, weight, ring, empty, scale_ring, units, scales, sizes,
    LINES: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp."""
    full = ring[2]
    begin, end = units
    for stage in range(STAGES):  # The kernel before this one does not write the weight.
        load_weight(weight, ring, stage, begin + stage, end, sizes, LINES)
    pdl_wait(PDL)
    for unit in range(begin, end):
        done = unit - begin
        stage = done % STAGES
        if done >= STAGES:
            mbarrier.wait(empty.index(stage), done // STAGES & 1 ^ 1)
            load_weight(weight, ring, stage, unit, end, sizes, LINES)
        load_x(x, ring, stage, unit, end, sizes, LINES)
        if len(scale_ring) > 0:
            _copy_scales(scale_ring, stage, unit, scales, sizes, LINES)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def _copy_scales(scale_ring, stage, unit, scales, sizes, LINES: gl.constexpr):
    """Copies the scales of a unit. Those beyond the last token, output or column are copies of the last ones."""
    of_x, of_weight = scale_ring
    weight_scale, ws_row, ws_column, x_scale, xs_row, xs_column = scales
    num_tokens, num_outputs, num_blocks, tile_units, _, _ = sizes
    ROW_BLOCKS: gl.constexpr = of_weight.shape[1]
    TOKENS: gl.constexpr = of_x.shape[1]
    ONE: gl.constexpr = gl.BlockedLayout([1], [WARP], [gl.num_warps()], [0])
    weight_tile, token_tile = parts_of_tile(unit // tile_units, sizes)
    token = gl.minimum(token_tile * TOKENS + gl.arange(0, TOKENS, ONE), num_tokens - 1)
    row_block = weight_tile * ROW_BLOCKS + gl.arange(0, ROW_BLOCKS, ONE)
    row_block = gl.minimum(row_block, gl.cdiv(num_outputs, BLOCK) - 1)
    for line in gl.static_range(LINES):
        block = gl.minimum(unit % tile_units * LINES + line, num_blocks - 1)
        place = stage * LINES + line
        cp_async(of_x.index(place), x_scale + token * xs_row + block * xs_column)
        pointers = weight_scale + row_block * ws_row + block * ws_column
        cp_async(of_weight.index(place), pointers)
