"""Products of many rows in 16 bits and of experts' int4 or MXFP4 weights on Hopper GPUs, specialised by warps.

As in `scaled_gemm_sm90`, persistent programs take one tile after the other, and loading warps bring the weights by TMA
and gather the rows of x. Outputs are the rows of the products here: wgmma takes those from registers, so nothing of the
dequantised weight is stored. Each of two warpgroups dequantises its weights of the next stage while its product of this
one runs. A weight is dequantised once for all rows of a tile, of which there are up to 256.
"""

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._products.int4 import NO_ZERO_POINT, scale_columns
from vllm_opset.kernels.triton._products.int4_words_sm90 import (
    BYTES,
    CHUNK,
    dequantised,
    group_offsets,
    groups_of_chunk,
    rows_of_chunk,
)
from vllm_opset.kernels.triton._products.int4_words_sm90 import ROWS as PART
from vllm_opset.kernels.triton._products.load_sm90 import (
    GATHERING,
    OUTPUTS_OF_BOX,
    available,
    barriers,
    box_layout,
    expert_of,
    is_aligned,
    load_tiles,
    rows_of,
)
from vllm_opset.kernels.triton._products.tiles import Order, tile_of
from vllm_opset.ops.schemes import MXFP4, is_mxfp4

WIDTH = CHUNK  # A stage has so many columns. They are a line of x.
# Stages of a loop, of which two products are in flight. The compiler serialises those that are so from loop to loop.
UNROLLED = gl.constexpr(2)
LEAST_ROWS = gl.constexpr(64)  # Larger tiles without choices in their second half skip it.
SCALED = gl.constexpr(MXFP4.group.columns)  # So many columns share a scale of MXFP4.
MANTISSA_BITS = gl.constexpr(7)  # The exponent of bf16, which is that of e8m0, lies above them.
# The scales of a stage by rows and groups, in the threads that widen their weights of MXFP4.
GROUPS = gl.constexpr(
    gl.SliceLayout(
        2,
        gl.DistributedLinearLayout(
            [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16], [0, 1, 0]],
            [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [[16, 0, 0], [32, 0, 0]], [],
            [PART.value, WIDTH.value // SCALED.value, SCALED.value],
        ),
    )
)  # fmt: skip
# Registers of a thread. The first multiplying warpgroup gets what all others leave of 512 for each 128 threads. Threads
# that gather 256 rows hold twice as many addresses.
MULTIPLYING_REGISTERS, LOADING_REGISTERS = gl.constexpr(208), gl.constexpr(96)


@gluon.jit(do_not_specialize=["num_rows", "num_tiles"])
def packed_experts_sm90(
    x, x_stride, weight, bias, out, weight_scale, zero_point, ws_expert, ws_row, ws_column, sorted_token_ids,
    expert_ids, num_rows, num_tiles, top_k,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, SCALED_COLUMNS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILES: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Launches at most as many programs as run at a time.

    weight: a TMA descriptor of boxes of OUTPUTS_OF_BOX rows and WIDTH columns: of bytes for MXFP4, and of pairs of
    bytes for int4. SCALED_COLUMNS: that share a scale.
    """
    pdl_wait(PDL)
    dtype: gl.constexpr = out.dtype.element_ty
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, ROWS, WIDTH], gl.NVMMASharedLayout(128, 16, rank=2))
    w_ring = gl.allocate_shared_memory(
        weight.dtype, [STAGES, OUTPUTS_OF_BOX, weight.block_type.shape[1]], weight.layout
    )
    staging = gl.allocate_shared_memory(dtype, [2, PART, ROWS], gl.NVMMASharedLayout(128, 16, rank=2, transposed=True))
    full, empty = barriers(STAGES, GATHERING)
    ring = (x_ring, w_ring, full, empty)
    tiles = (sorted_token_ids, expert_ids, num_rows, num_tiles, top_k)
    scales = (weight_scale, zero_point, ws_expert, ws_row, ws_column)
    gl.warp_specialize(
        [
            (_multiply, (0, ring, staging, tiles, scales, bias, out,
                         OUTPUTS, COLUMNS, SCALED_COLUMNS, BLOCK_SIZE, TILES, ROWS, GROUP)),
            (_multiply, (1, ring, staging, tiles, scales, bias, out,
                         OUTPUTS, COLUMNS, SCALED_COLUMNS, BLOCK_SIZE, TILES, ROWS, GROUP)),
            (load_tiles, (x, x_stride, weight, ring, tiles, OUTPUTS, COLUMNS, BLOCK_SIZE, TILES, 1, GROUP, STAGES,
                          (), (), UNROLLED)),
        ],
        [4, 4],
        [MULTIPLYING_REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _multiply(
    INDEX: gl.constexpr, ring, staging, tiles, scales, bias, out,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, SCALED_COLUMNS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILES: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The products of one of two warpgroups: half of the outputs of each tile."""
    NUM_COLUMNS: gl.constexpr = -(-OUTPUTS // OUTPUTS_OF_BOX)
    num_rows, num_tiles = tiles[2], tiles[3]
    done = 0
    for index in range(gl.program_id(0), num_tiles * NUM_COLUMNS, gl.num_programs(0)):
        tile, column = tile_of(index, num_tiles, NUM_COLUMNS, GROUP)
        expert = expert_of(tile, tiles, TILES)
        first_output = column * OUTPUTS_OF_BOX + INDEX * PART
        if ROWS > LEAST_ROWS:
            # A block's choices come before its empty places.
            second = tile % TILES * ROWS + ROWS // 2
            if gl.load(tiles[0] + tile // TILES * BLOCK_SIZE + second, second < BLOCK_SIZE, num_rows) < num_rows:
                _tile(
                    INDEX, ring, staging, tiles, scales, bias, out, tile, expert, first_output, done,
                    OUTPUTS, COLUMNS, SCALED_COLUMNS, BLOCK_SIZE, TILES, ROWS, ROWS,
                )  # fmt: skip
            else:
                _tile(
                    INDEX, ring, staging, tiles, scales, bias, out, tile, expert, first_output, done,
                    OUTPUTS, COLUMNS, SCALED_COLUMNS, BLOCK_SIZE, TILES, ROWS, ROWS // 2,
                )  # fmt: skip
        else:
            _tile(
                INDEX, ring, staging, tiles, scales, bias, out, tile, expert, first_output, done,
                OUTPUTS, COLUMNS, SCALED_COLUMNS, BLOCK_SIZE, TILES, ROWS, ROWS,
            )  # fmt: skip
        done += gl.where(expert < 0, 0, _steps(COLUMNS))


@gluon.jit
def _steps(COLUMNS: gl.constexpr):
    """The stages of a tile. Of columns beyond the last, x has zeros."""
    return UNROLLED * gl.cdiv(COLUMNS, UNROLLED * WIDTH)


@gluon.jit
def _tile(
    INDEX: gl.constexpr, ring, staging, tiles, scales, bias, out, tile, expert, first_output, done,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, SCALED_COLUMNS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILES: gl.constexpr, ROWS: gl.constexpr, FILLED: gl.constexpr,
):  # fmt: skip
    """The products of a warpgroup for the first FILLED rows of a tile. done: the stages of the tiles before."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FILLED, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    x_ring, w_ring, full, empty = ring
    STAGES: gl.constexpr = x_ring.shape[0]
    sums = gl.zeros([PART, FILLED], gl.float32, SUMS)
    if expert >= 0:
        last_step = _steps(COLUMNS) - 1
        pointers = _scale_pointers(scales, expert, first_output, OUTPUTS, SCALED_COLUMNS)
        of_step = _scales_at(pointers, scales, 0, COLUMNS, SCALED_COLUMNS)
        following = _scales_at(pointers, scales, 1, COLUMNS, SCALED_COLUMNS)
        mbarrier.wait(full.index(done % STAGES), done // STAGES & 1)
        factor = _factor(INDEX, w_ring.index(done % STAGES), of_step, x_ring.dtype, FACTOR)
        for step in range(0, last_step + 1, UNROLLED):
            first, second = (done + step) % STAGES, (done + step + 1) % STAGES
            hopper.fence_async_shared()  # gathered rows were written by threads, and wgmma reads them
            product = hopper.warpgroup_mma(
                factor, x_ring.index(first).slice(0, FILLED).permute((1, 0)), sums, is_async=True
            )
            mbarrier.wait(full.index(second), (done + step + 1) // STAGES & 1)
            hopper.fence_async_shared()
            next_factor = _factor(INDEX, w_ring.index(second), following, x_ring.dtype, FACTOR)
            of_step = _scales_at(pointers, scales, step + 2, COLUMNS, SCALED_COLUMNS)
            following = _scales_at(pointers, scales, step + 3, COLUMNS, SCALED_COLUMNS)
            product = hopper.warpgroup_mma(
                next_factor, x_ring.index(second).slice(0, FILLED).permute((1, 0)), product, is_async=True
            )
            product = hopper.warpgroup_mma_wait(1, deps=(product,))
            mbarrier.arrive(empty.index(first))
            next_done = done + gl.minimum(step + 2, last_step)
            mbarrier.wait(full.index(next_done % STAGES), next_done // STAGES & 1)
            factor = _factor(INDEX, w_ring.index(next_done % STAGES), of_step, x_ring.dtype, FACTOR)
            sums, next_factor, factor = hopper.warpgroup_mma_wait(0, deps=(product, next_factor, factor))
            mbarrier.arrive(empty.index(second))
    output = first_output + gl.arange(0, PART, gl.SliceLayout(1, SUMS))
    if bias is not None:
        inside = (output < OUTPUTS) & (expert >= 0)
        sums += gl.load(bias + expert * OUTPUTS + output, inside, 0.0).to(gl.float32)[:, None]
    _store(
        sums, staging.index(INDEX).slice(0, FILLED, 1), out, tile, first_output, tiles,
        OUTPUTS, BLOCK_SIZE, TILES, ROWS, FILLED,
    )  # fmt: skip


@gluon.jit
def _scale_pointers(scales, expert, first_output, OUTPUTS: gl.constexpr, SCALED_COLUMNS: gl.constexpr):
    """Pointers to the scales of a warpgroup's outputs, and to the zero points if there are any.

    Rows beyond the last output are zero, as the copy engine brings them, or not stored, whatever their scale is.
    """
    weight_scale, zero_point, ws_expert, ws_row, ws_column = scales
    if weight_scale.dtype.element_ty == gl.uint8:
        row = gl.arange(0, PART, gl.SliceLayout(1, GROUPS))
        of_group = gl.arange(0, WIDTH // SCALED, gl.SliceLayout(0, GROUPS))
        offset = expert.to(gl.int64) * ws_expert + gl.minimum(first_output + row, OUTPUTS - 1)[:, None] * ws_row
        return (weight_scale + offset + (of_group * ws_column)[None, :],)
    else:
        GROUPS_OF_STAGE: gl.constexpr = groups_of_chunk(SCALED_COLUMNS)
        row = gl.minimum(first_output + rows_of_chunk(GROUPS_OF_STAGE), OUTPUTS - 1)
        offset = expert.to(gl.int64) * ws_expert + group_offsets(row, ws_row, ws_column, GROUPS_OF_STAGE)
        pointers = (weight_scale + offset,)
        if zero_point is not None:
            pointers += (zero_point + offset,)
        return pointers


@gluon.jit
def _scales_at(pointers, scales, step, COLUMNS: gl.constexpr, SCALED_COLUMNS: gl.constexpr):
    """The scales of a stage's weights, and the zero points if there are any."""
    ws_column = scales[4]
    if pointers[0].dtype.element_ty == gl.uint8:
        first = step * (WIDTH // SCALED)
        inside = (first + gl.arange(0, WIDTH // SCALED, gl.SliceLayout(0, GROUPS)) < COLUMNS // SCALED)[None, :]
        return (gl.load(pointers[0] + first * ws_column, inside, 0),)
    else:
        column = gl.minimum(step * WIDTH, gl.cdiv(COLUMNS, WIDTH) * WIDTH - WIDTH)
        found = ()
        for number in gl.static_range(len(pointers)):
            found += (gl.load(pointers[number] + column // SCALED_COLUMNS * ws_column),)
        return found


@gluon.jit
def _factor(INDEX: gl.constexpr, w, of_step, dtype: gl.constexpr, FACTOR: gl.constexpr):
    """A warpgroup's dequantised weights of a stage. w: those of the stage, as they are stored."""
    w = w.slice(INDEX * PART, PART)
    if w.dtype == gl.uint8:
        PACKED: gl.constexpr = gl.DotOperandLayout(0, FACTOR.parent, 1)
        scale = (of_step[0].to(gl.int16) << MANTISSA_BITS).to(gl.bfloat16, bitcast=True)
        widened = gl.fp4_to_fp(w.load(PACKED), gl.bfloat16, 1)
        widened = widened.reshape([PART, WIDTH // SCALED, SCALED]) * scale[:, :, None]
        return gl.convert_layout(widened.reshape([PART, WIDTH]), FACTOR)
    else:
        scale = of_step[0].to(dtype)
        if len(of_step) == 1:
            zero = gl.full(scale.shape, NO_ZERO_POINT, gl.float32, scale.type.layout)
        else:
            zero = of_step[1].to(gl.float32)
        return dequantised(w.load(BYTES), zero, scale, FACTOR)


@gluon.jit
def _store(
    sums, staging, out, tile, first_output, tiles,
    OUTPUTS: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILES: gl.constexpr, ROWS: gl.constexpr, FILLED: gl.constexpr,
):  # fmt: skip
    """Writes results in whole lines, by way of shared memory."""
    LINES: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    staging.store(sums.to(staging.dtype))
    choice = rows_of(tile, gl.arange(0, FILLED, gl.SliceLayout(0, LINES)), tiles, BLOCK_SIZE, TILES, ROWS)
    output = first_output + gl.arange(0, PART, gl.SliceLayout(1, LINES))
    inside = (choice < tiles[2])[None, :] & (output < OUTPUTS)[:, None]
    gl.store(out + choice.to(gl.int64)[None, :] * OUTPUTS + output[:, None], staging.load(LINES), inside)


class Packed(NamedTuple):
    """The operands of a call. weight is [experts, outputs, columns / 2]. int4 may have a zero_point."""

    x: torch.Tensor
    weight: torch.Tensor
    weight_scale: torch.Tensor
    zero_point: torch.Tensor | None


def can(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> bool:
    """Whether a Hopper GPU multiplies x by these weights by its own kernel: in stages of one scale or of two whole
    groups, or by MXFP4's.
    """
    if not available(x.device) or not is_aligned(x) or not is_aligned(weight) or x.element_size() != 2:
        return False
    if is_mxfp4(weight, weight_scale):
        return True
    columns, group = x.shape[-1], scale_columns(weight[0], weight_scale[0])
    two_groups = groups_of_chunk(group) == 2 and columns % WIDTH.value == 0
    return two_groups or group % WIDTH.value == 0 or group == columns > WIDTH.value


def packed_grouped_gemm(
    call: Packed, bias: torch.Tensor | None, out: torch.Tensor, order: Order, values: _launch.Parameters
) -> None:
    """Writes the product of the contract of `grouped_gemm` to out. values: the launch's rows, group and stages."""
    (x, weight, weight_scale, zero_point), device = call, call.x.device
    mxfp4, (outputs, columns) = is_mxfp4(weight, weight_scale), (weight.shape[1], x.shape[1])
    rows = min(values["rows"], order.block_size & -order.block_size)  # a power of two
    tiles = _launch.cdiv(order.block_size, rows)
    num_tiles = len(order.expert_ids) * tiles
    stored = weight.view(-1, columns // 2)
    stored = stored if mxfp4 else stored.view(torch.int16)
    bits = 8 * stored.element_size()
    box = [OUTPUTS_OF_BOX.value, WIDTH.value * 4 // bits]
    num_programs = min(num_tiles * _launch.cdiv(outputs, OUTPUTS_OF_BOX.value), _launch.multiprocessors(device))
    _launch.launch(
        packed_experts_sm90, (num_programs,),
        x, x.stride(0), TensorDescriptor.from_tensor(stored, box, box_layout(32, bits)), bias, out,
        weight_scale, zero_point, *weight_scale.stride(), order.sorted_token_ids, order.expert_ids, len(out), num_tiles,
        order.top_k, OUTPUTS=outputs, COLUMNS=columns,
        SCALED_COLUMNS=SCALED.value if mxfp4 else scale_columns(weight[0], weight_scale[0]),
        BLOCK_SIZE=order.block_size, TILES=tiles, ROWS=rows, GROUP=values["group"], STAGES=values["stages"],
        num_warps=4, **_launch.launch_options(device),
    )  # fmt: skip
