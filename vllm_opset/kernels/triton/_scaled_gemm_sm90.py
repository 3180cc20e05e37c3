"""Products of many rows in fp8 on Hopper GPUs, dense and of experts, specialised by warps.

While loading warps (`_load_sm90`) bring 128 columns at a time, two warpgroups multiply 64 rows each, or half of the
outputs of the same 64 rows. By blocks, each product of 128 columns starts from zero, and is multiplied by its scales
and added in fp32 while the other warpgroup's products run. By rows, tensor cores add the products. They keep some 14
bits of a sum, as in `_scaled_grouped_gemm`.
"""

import math
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._load_sm90 import (
    LOADING_REGISTERS,
    MULTIPLYING_REGISTERS,
    WARP,
    available,
    await_turn,
    barriers,
    expert_of,
    is_aligned,
    load_tiles,
    pass_turn,
    rows_of,
    turns,
)
from vllm_opset.kernels.triton._tiles import Order, tile_of
from vllm_opset.ops.schemes import FP8, WHOLE, GroupShape, group_of

OUT_BYTES = 2  # Results of 32 bits do not fit shared memory beside the ring.
# A stage has so many columns, and a product so many outputs. Those of a block of scales are as many.
WIDTH = gl.constexpr(128)
HALF = gl.constexpr(64)  # A product has so many rows.
# Warpgroups start their products in turn: the next one when one has started, or when half of its columns are done.
AT_START, AT_HALF = gl.constexpr(1), gl.constexpr(2)
# Registers of a thread with three multiplying warpgroups.
FEWER_REGISTERS, FEWEST_REGISTERS = gl.constexpr(160), gl.constexpr(24)
BLOCKS, TOKEN_BLOCKS = GroupShape(WIDTH.value, WIDTH.value), GroupShape(1, WIDTH.value)


@gluon.jit(do_not_specialize=["num_rows", "num_tiles"])
def scaled_gemm_sm90(
    x, x_stride, weight, bias, out, weight_scale, ws_expert, ws_row, ws_column, x_scale, xs_row, xs_column,
    sorted_token_ids, expert_ids, num_rows, num_tiles, top_k,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, BY_BLOCKS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILES: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    ORDERED: gl.constexpr, COPIED_SCALES: gl.constexpr, COPIED_RESULTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Launches at most as many programs as run at a time.

    x: a TMA descriptor of boxes of rows, or for experts a pointer. weight: a descriptor of boxes [WIDTH, WIDTH].
    out: a descriptor of boxes [HALF, WIDTH] with COPIED_RESULTS, otherwise a pointer.
    COPIED_SCALES: whether the loading warps bring the scales by blocks.
    num_rows: of the result. ROWS: of a tile, one to three HALFs. PARTS: the products of a warpgroup, of WIDTH outputs
    each.
    For experts, there are TILES tiles in a block of BLOCK_SIZE.
    """
    pdl_wait(PDL)
    BOX: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    OUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    WARPGROUPS: gl.constexpr = 3 if ROWS == 3 * HALF else 2
    TILE_PARTS: gl.constexpr = 2 * PARTS if ROWS == HALF else PARTS
    X_ROWS: gl.constexpr = ROWS if expert_ids is not None else x.block_type.shape[0]
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * (ROWS // X_ROWS), X_ROWS, WIDTH], BOX)
    w_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * TILE_PARTS, WIDTH, WIDTH], BOX)
    out_dtype: gl.constexpr = out.dtype if COPIED_RESULTS else out.dtype.element_ty
    staging = gl.allocate_shared_memory(out_dtype, [WARPGROUPS, HALF, WIDTH], OUT)
    LOADERS: gl.constexpr = 1 if expert_ids is None else 4
    scale_ring = ()
    if COPIED_SCALES:
        LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        PLACES: gl.constexpr = 4 * HALF if WARPGROUPS == 3 else ROWS  # a power of two
        of_x = gl.allocate_shared_memory(gl.float32, [STAGES, PLACES], LINE)
        scale_ring = (of_x, gl.allocate_shared_memory(gl.float32, [STAGES, TILE_PARTS], LINE))
    COPYING: gl.constexpr = LOADERS * WARP if COPIED_SCALES or expert_ids is not None else 0
    full, empty = barriers(STAGES, COPYING, WARPGROUPS)
    ring = (x_ring, w_ring, full, empty, turns(WARPGROUPS))
    tiles = (sorted_token_ids, expert_ids, num_rows, num_tiles, top_k)
    scales = (weight_scale, ws_expert, ws_row, ws_column, x_scale, xs_row, xs_column)
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (0, ring, scale_ring, staging, tiles, scales, bias, out,
                             OUTPUTS, COLUMNS, BY_BLOCKS, BLOCK_SIZE, TILES, ROWS, PARTS, GROUP, STAGES, ORDERED,
                             COPIED_RESULTS)),
                (_multiply, (1, ring, scale_ring, staging, tiles, scales, bias, out,
                             OUTPUTS, COLUMNS, BY_BLOCKS, BLOCK_SIZE, TILES, ROWS, PARTS, GROUP, STAGES, ORDERED,
                             COPIED_RESULTS)),
                (load_tiles, (x, x_stride, weight, ring, tiles,
                              OUTPUTS, COLUMNS, BLOCK_SIZE, TILES, TILE_PARTS, GROUP, STAGES, scale_ring, scales)),
            ],
            [4, LOADERS],
            [MULTIPLYING_REGISTERS, LOADING_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, ring, scale_ring, staging, tiles, scales, bias, out,
                             OUTPUTS, COLUMNS, BY_BLOCKS, BLOCK_SIZE, TILES, ROWS, PARTS, GROUP, STAGES, ORDERED,
                             COPIED_RESULTS)),
                (_multiply, (1, ring, scale_ring, staging, tiles, scales, bias, out,
                             OUTPUTS, COLUMNS, BY_BLOCKS, BLOCK_SIZE, TILES, ROWS, PARTS, GROUP, STAGES, ORDERED,
                             COPIED_RESULTS)),
                (_multiply, (2, ring, scale_ring, staging, tiles, scales, bias, out,
                             OUTPUTS, COLUMNS, BY_BLOCKS, BLOCK_SIZE, TILES, ROWS, PARTS, GROUP, STAGES, ORDERED,
                             COPIED_RESULTS)),
                (load_tiles, (x, x_stride, weight, ring, tiles,
                              OUTPUTS, COLUMNS, BLOCK_SIZE, TILES, TILE_PARTS, GROUP, STAGES, scale_ring, scales)),
            ],
            [4, 4, LOADERS],
            [FEWER_REGISTERS, FEWER_REGISTERS, FEWEST_REGISTERS],
        )  # fmt: skip


@gluon.jit
def _multiply(
    INDEX: gl.constexpr, ring, scale_ring, staging, tiles, scales, bias, out,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, BY_BLOCKS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILES: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    ORDERED: gl.constexpr, COPIED_RESULTS: gl.constexpr,
):  # fmt: skip
    """The products of one warpgroup: HALF rows of each tile. Of tiles with no more rows, half of the outputs."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    FIRST_ROW: gl.constexpr = INDEX * HALF if ROWS > HALF else 0
    FIRST_PART: gl.constexpr = INDEX * PARTS if ROWS == HALF else 0
    TILE_PARTS: gl.constexpr = 2 * PARTS if ROWS == HALF else PARTS
    NUM_COLUMNS: gl.constexpr = -(-OUTPUTS // (TILE_PARTS * WIDTH))
    x_ring, w_ring, full, empty, in_turn = ring
    X_ROWS: gl.constexpr = x_ring.shape[1]
    _, expert_ids, num_rows, num_tiles, top_k = tiles
    weight_scale, ws_expert, ws_row, _, x_scale, xs_row, _ = scales
    row = FIRST_ROW + gl.arange(0, HALF, gl.SliceLayout(1, ACC))
    done = 0
    for index in range(gl.program_id(0), num_tiles * NUM_COLUMNS, gl.num_programs(0)):
        tile, column = tile_of(index, num_tiles, NUM_COLUMNS, GROUP)
        expert = expert_of(tile, tiles, TILES)
        first_output = (column * TILE_PARTS + FIRST_PART) * WIDTH
        choice = rows_of(tile, row, tiles, BLOCK_SIZE, TILES, ROWS)
        of_rows = gl.minimum(choice, num_rows - 1) // top_k * xs_row
        of_expert = expert * ws_expert
        sums = (gl.zeros([HALF, WIDTH], gl.float32, ACC),) * PARTS
        if BY_BLOCKS and len(scale_ring) == 0:
            following = _scales_at(0, scales, of_rows, of_expert, first_output, OUTPUTS, COLUMNS, PARTS)
        for step in range(gl.where(expert < 0, 0, gl.cdiv(COLUMNS, WIDTH))):
            stage = done % STAGES
            if BY_BLOCKS and len(scale_ring) == 0:  # a step ahead: loads take longer than a product
                of_step = following
                following = _scales_at(step + 1, scales, of_rows, of_expert, first_output, OUTPUTS, COLUMNS, PARTS)
            mbarrier.wait(full.index(stage), done // STAGES & 1)
            if expert_ids is not None:
                hopper.fence_async_shared()  # gathered rows were written by threads, and wgmma reads them
            x = x_ring.index(stage * (ROWS // X_ROWS) + FIRST_ROW // X_ROWS).slice(FIRST_ROW % X_ROWS, HALF)
            if BY_BLOCKS:
                if len(scale_ring) > 0:
                    of_step = _copied_scales(scale_ring, stage, FIRST_ROW, TILE_PARTS, FIRST_PART, PARTS, ACC)
                sums = _add_scaled(
                    INDEX, sums, of_step, x, w_ring, stage * TILE_PARTS + FIRST_PART, empty.index(stage), in_turn,
                    done * PARTS, PARTS, ORDERED,
                )  # fmt: skip
            else:
                first = stage * TILE_PARTS + FIRST_PART
                sums = _add(INDEX, sums, x, w_ring, first, in_turn, done, PARTS, ORDERED)
                mbarrier.arrive(empty.index(stage))
            done += 1
        for part in gl.static_range(PARTS):
            output = first_output + part * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, ACC))
            y, is_output = sums[part], (output < OUTPUTS) & (expert >= 0)
            if not BY_BLOCKS:
                y *= gl.load(weight_scale + of_expert + output * ws_row, is_output, 0.0)[None, :]
                # An absent expert's results are zero, whatever the scales of x are.
                y *= gl.load(x_scale + of_rows, (choice < num_rows) & (expert >= 0), 0.0)[:, None]
            if bias is not None:
                y += gl.load(bias + expert * OUTPUTS + output, is_output, 0.0).to(gl.float32)[None, :]
            if COPIED_RESULTS:
                tma.store_wait(0)  # of the part before
                staging.index(INDEX).store(y.to(out.dtype))
                hopper.fence_async_shared()
                corner = [tile * ROWS + FIRST_ROW, first_output + part * WIDTH]
                tma.async_copy_shared_to_global(out, corner, staging.index(INDEX))
            else:
                _store(
                    y, staging.index(INDEX), out, tile, FIRST_ROW, first_output + part * WIDTH, tiles,
                    OUTPUTS, BLOCK_SIZE, TILES, ROWS,
                )  # fmt: skip
    if COPIED_RESULTS:
        tma.store_wait(0)


@gluon.jit
def _scales_at(
    step, scales, of_rows, of_expert, first_output,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """The scales of a stage's rows of x, and of its weights for each part. Beyond the last stage, those of the last."""
    weight_scale, _, ws_row, ws_column, x_scale, _, xs_column = scales
    step = gl.minimum(step, gl.cdiv(COLUMNS, WIDTH) - 1)
    found = (gl.load(x_scale + of_rows + step * xs_column),)
    for part in gl.static_range(PARTS):
        block = gl.minimum(first_output // WIDTH + part, gl.cdiv(OUTPUTS, WIDTH) - 1)
        found += (gl.load(weight_scale + (of_expert + block * ws_row + step * ws_column)),)
    return found


@gluon.jit
def _copied_scales(
    scale_ring, stage, FIRST_ROW: gl.constexpr, TILE_PARTS: gl.constexpr, FIRST_PART: gl.constexpr,
    PARTS: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """As `_scales_at`, from shared memory. Those of the weight are tensors of one element."""
    of_x, of_weight = scale_ring
    found = (of_x.index(stage).slice(FIRST_ROW, HALF).load(gl.SliceLayout(1, ACC)),)
    for part in gl.static_range(PARTS):
        found += (of_weight.index(stage).slice(FIRST_PART + part, 1).load(gl.SliceLayout(1, ACC)),)
    return found


@gluon.jit
def _add_scaled(
    INDEX: gl.constexpr, sums, scales, x, w_ring, first, read, in_turn, number,
    PARTS: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Adds the products of a stage, multiplied by their scales. read: the barrier of those that have read it.

    number: of products that each warpgroup has started before.
    """
    ACC: gl.constexpr = sums[0].type.layout
    zeros = gl.zeros([HALF, WIDTH], gl.float32, ACC)
    added = ()
    for part in gl.static_range(PARTS):
        if ORDERED:
            await_turn(in_turn, number + part, INDEX)
        if ORDERED == AT_HALF:
            product = _by_halves(INDEX, x, w_ring.index(first + part), zeros, in_turn)
        else:
            w = w_ring.index(first + part).permute((1, 0))
            product = hopper.warpgroup_mma(x, w, zeros, use_acc=False, is_async=True)
            if ORDERED == AT_START:
                pass_turn(in_turn, INDEX)
        product = hopper.warpgroup_mma_wait(0, deps=(product,))
        if part == PARTS - 1:
            mbarrier.arrive(read)
        total = sums[part] + product * (scales[0] * scales[1 + part])[:, None]
        if part < PARTS - 1:  # now: registers do not hold the next product too
            total = hopper.warpgroup_mma_wait(0, deps=(total,))
        added += (total,)
    return added


@gluon.jit
def _by_halves(INDEX: gl.constexpr, x, w, zeros, in_turn):
    """Starts a product, and lets the other warpgroup start its own when the first half of the columns is done.

    Tensor cores may take the instructions of both by turns. Then two products that start together end together, and
    nothing runs while both are added.
    """
    MIDDLE: gl.constexpr = WIDTH // 2
    x_left, w_left = x.slice(0, MIDDLE, 1), w.slice(0, MIDDLE, 1).permute((1, 0))
    product = hopper.warpgroup_mma(x_left, w_left, zeros, use_acc=False, is_async=True)
    x_right, w_right = x.slice(MIDDLE, MIDDLE, 1), w.slice(MIDDLE, MIDDLE, 1).permute((1, 0))
    product = hopper.warpgroup_mma(x_right, w_right, product, is_async=True)
    product = hopper.warpgroup_mma_wait(1, deps=(product,))
    pass_turn(in_turn, INDEX)
    return product


@gluon.jit
def _add(INDEX: gl.constexpr, sums, x, w_ring, first, in_turn, number, PARTS: gl.constexpr, ORDERED: gl.constexpr):
    """Adds the products of a stage on tensor cores. number: of stages before."""
    if ORDERED:
        await_turn(in_turn, number, INDEX)
    added = ()
    for part in gl.static_range(PARTS):
        w = w_ring.index(first + part).permute((1, 0))
        added += (hopper.warpgroup_mma(x, w, sums[part], is_async=True),)
    if ORDERED:
        pass_turn(in_turn, INDEX)
    if PARTS == 1:
        return (hopper.warpgroup_mma_wait(0, deps=added),)
    else:
        return hopper.warpgroup_mma_wait(0, deps=added)


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
    gl.store(out + choice.to(gl.int64)[:, None] * OUTPUTS + output[None, :], staging.load(LINES), inside)


class Operands(NamedTuple):
    """What a call multiplies. weight: [outputs, columns], or [experts, outputs, columns]."""

    x: torch.Tensor
    weight: torch.Tensor
    weight_scale: torch.Tensor | None
    x_scale: torch.Tensor | None
    out_dtype: torch.dtype | None


def can(call: Operands) -> bool:
    """Whether a Hopper GPU multiplies these by its own kernel: fp8 by blocks of 128, or by rows or whole tensors."""
    if call.x_scale is None or not available(call.x.device):
        return False
    stored = call.x.dtype is FP8 and call.weight.dtype is FP8 and call.out_dtype.itemsize == OUT_BYTES
    aligned = all(map(is_aligned, (call.x, call.weight))) and call.x.ndim == 2 and len(call.x)
    return bool(stored and aligned) and (by_blocks(call) or by_rows(call))


def scaled_linear(call: Operands, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of the contract of `linear`, for arguments that were checked."""
    out = call.x.new_empty((len(call.x), len(call.weight)), dtype=call.out_dtype)
    _multiply_scaled(call, bias, out, _launch.parameters("linear_scaled_sm90", call.x.device, len(out)))
    return out


def scaled_grouped_gemm(call: Operands, bias: torch.Tensor | None, out: torch.Tensor, order: Order) -> None:
    """Writes the product of the contract of `grouped_gemm` to out."""
    values = _launch.parameters("scaled_grouped_gemm_prefill_sm90", call.x.device, order.block_size)
    _multiply_scaled(call, bias, out, values | {"rows": min(values["rows"], order.block_size)}, order)


def _multiply_scaled(
    call: Operands, bias: torch.Tensor | None, out: torch.Tensor, values: _launch.Parameters, order: Order | None = None
) -> None:
    """values: the rows and outputs of a tile, and group, stages and ordered of the kernel."""
    (outputs, columns), device = call.weight.shape[-2:], call.x.device
    rows = values["rows"]
    warpgroups_of_outputs = 2 if rows == HALF.value else 1
    parts = max(1, values["outputs"] // (warpgroups_of_outputs * WIDTH.value))
    x, w_strides, tiles, num_tiles = call.x, strides(call.weight_scale), 1, _launch.cdiv(len(out), rows)
    box = NVMMASharedLayout(128, 8, rank=2)
    copied_scales = bool(values["copied_scales"]) and by_blocks(call)
    copied_results = bool(values["copied_results"]) and order is None and is_aligned(out)
    if copied_results:
        out_box = NVMMASharedLayout(128, 8 * OUT_BYTES, rank=2)
        result = TensorDescriptor.from_tensor(out, [HALF.value, WIDTH.value], out_box)
    else:
        result = out
    if order is None:
        box_rows = math.gcd(rows, 2 * HALF.value)
        x, w_strides = TensorDescriptor.from_tensor(call.x, [box_rows, WIDTH.value], box), (0, *w_strides)
    else:
        tiles = _launch.cdiv(order.block_size, rows)
        num_tiles = len(order.expert_ids) * tiles
    weight = TensorDescriptor.from_tensor(call.weight.view(-1, columns), [WIDTH.value, WIDTH.value], box)
    tile_outputs = warpgroups_of_outputs * parts * WIDTH.value
    num_programs = min(num_tiles * _launch.cdiv(outputs, tile_outputs), _launch.multiprocessors(device))
    sorted_token_ids, expert_ids, top_k = order or (None, None, 1)
    scaled_gemm_sm90[(num_programs,)](
        x, call.x.stride(0), weight, bias, result, call.weight_scale, *w_strides, call.x_scale, *strides(call.x_scale),
        sorted_token_ids, expert_ids, len(out), num_tiles, top_k,
        OUTPUTS=outputs, COLUMNS=columns, BY_BLOCKS=by_blocks(call), BLOCK_SIZE=order.block_size if order else None,
        TILES=tiles, ROWS=rows, PARTS=parts, GROUP=values["group"], STAGES=values["stages"],
        ORDERED=values["ordered"], COPIED_SCALES=copied_scales, COPIED_RESULTS=copied_results,
        num_warps=4, **_launch.launch_options(device),
    )  # fmt: skip


def strides(scale: torch.Tensor) -> tuple[int, ...]:
    """From scale to scale: 0 where there is one scale."""
    return tuple(0 if size == 1 else stride for size, stride in zip(scale.shape, scale.stride(), strict=True))


def _groups(call: Operands) -> tuple[GroupShape, GroupShape]:
    """Those of the scales of x, and of the weight or of one of its experts."""
    experts = call.weight.ndim == 3
    weight, scale = (call.weight[0], call.weight_scale[0]) if experts else (call.weight, call.weight_scale)
    return group_of(call.x.shape, call.x_scale), group_of(weight.shape, scale)


def by_blocks(call: Operands) -> bool:
    of_x, of_weight = _groups(call)
    # The scales of one token are those of whole columns as well.
    return of_x in (TOKEN_BLOCKS, GroupShape(WHOLE, TOKEN_BLOCKS.columns)) and of_weight == BLOCKS


def by_rows(call: Operands) -> bool:
    of_x, of_weight = _groups(call)
    return of_x.columns == of_weight.columns == WHOLE and {of_x.rows, of_weight.rows} <= {1, WHOLE}
