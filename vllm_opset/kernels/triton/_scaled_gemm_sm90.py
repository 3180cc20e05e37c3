"""Products of many rows in fp8 on Hopper GPUs, dense and of experts, specialised by warps.

A persistent program takes one tile after the other. One or four loading warps bring 128 columns of x and of the weight
at a time into a ring of STAGES in shared memory: the tensor memory accelerator (TMA) copies them, but for the rows of
experts, which are gathered. Two warpgroups multiply 64 rows each, or half of the outputs of the same 64 rows. fp8
tensor cores keep some 14 bits of a sum. So each product of 128 columns starts from zero, and is multiplied by its
scales and added in fp32 while the other warpgroup's products run.
"""

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm_opset.kernels.triton import INTERPRETED, _launch
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._tiles import tile_of
from vllm_opset.ops.schemes import FP8, WHOLE, GroupShape, group_of
from vllm_opset.targets import WGMMA

COPY_BYTES = 16  # TMA needs addresses and strides that are multiples of 16 bytes
OUT_BYTES = 2  # results of 32 bits do not fit shared memory beside the ring
WIDTH = gl.constexpr(128)  # the columns of a stage, and the outputs of a product: those of a block of scales
HALF = gl.constexpr(64)  # the rows of a product
# Registers of a thread. The first warpgroup gets what the others leave of 512 for each of 128 threads.
MULTIPLYING_REGISTERS = gl.constexpr(232)
LOADING_REGISTERS = gl.constexpr(40)
GATHERING_REGISTERS = gl.constexpr(40)
BLOCKS, TOKEN_BLOCKS = GroupShape(WIDTH.value, WIDTH.value), GroupShape(1, WIDTH.value)


@gluon.jit(do_not_specialize=["num_rows", "num_tiles"])
def scaled_gemm_sm90(
    x, x_stride, weight, bias, out, weight_scale, ws_expert, ws_row, ws_column, x_scale, xs_row, xs_column,
    sorted_token_ids, expert_ids, num_rows, num_tiles, top_k,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, BY_BLOCKS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILES: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    IN_TURN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Launches at most as many programs as run at a time.

    x: a TMA descriptor of boxes [HALF, WIDTH], or for experts a pointer. weight: a descriptor of boxes [WIDTH, WIDTH].
    num_rows: of the result. ROWS: of a tile, one or two HALFs. PARTS: the products of a warpgroup, WIDTH outputs each.
    For experts, there are TILES tiles in a block of BLOCK_SIZE.
    """
    pdl_wait(PDL)
    BOX: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    OUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BOXES: gl.constexpr = ROWS // HALF
    TILE_PARTS: gl.constexpr = PARTS * (2 // BOXES)
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, WIDTH], BOX)
    w_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * TILE_PARTS, WIDTH, WIDTH], BOX)
    staging = gl.allocate_shared_memory(out.dtype.element_ty, [2, HALF, WIDTH], OUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Each gathering thread arrives when its copies have.
        mbarrier.init(full.index(stage), count=1 if expert_ids is None else 129)
        mbarrier.init(empty.index(stage), count=2)
    ring = (x_ring, w_ring, full, empty)
    tiles = (sorted_token_ids, expert_ids, num_rows, num_tiles, top_k)
    scales = (weight_scale, ws_expert, ws_row, ws_column, x_scale, xs_row, xs_column)
    LOADERS: gl.constexpr = 1 if expert_ids is None else 4
    gl.warp_specialize(
        [
            (_multiply, (0, ring, staging, tiles, scales, bias, out,
                         OUTPUTS, COLUMNS, BY_BLOCKS, BLOCK_SIZE, TILES, ROWS, PARTS, GROUP, STAGES, IN_TURN)),
            (_multiply, (1, ring, staging, tiles, scales, bias, out,
                         OUTPUTS, COLUMNS, BY_BLOCKS, BLOCK_SIZE, TILES, ROWS, PARTS, GROUP, STAGES, IN_TURN)),
            (_load, (x, x_stride, weight, ring, tiles,
                     OUTPUTS, COLUMNS, BLOCK_SIZE, TILES, ROWS, TILE_PARTS, GROUP, STAGES)),
        ],
        [4, LOADERS],
        [MULTIPLYING_REGISTERS, LOADING_REGISTERS if expert_ids is None else GATHERING_REGISTERS],
    )  # fmt: skip


@gluon.jit
def rows_of(tile, row, tiles, BLOCK_SIZE: gl.constexpr, TILES: gl.constexpr, ROWS: gl.constexpr):
    """The rows of the result that are the rows `row` of a tile: num_rows or more for none."""
    sorted_token_ids, expert_ids, num_rows, _, _ = tiles
    row += (tile % TILES if expert_ids is not None else tile) * ROWS
    if expert_ids is None:
        return row
    else:
        return gl.load(sorted_token_ids + tile // TILES * BLOCK_SIZE + row, row < BLOCK_SIZE, num_rows).to(gl.int32)


@gluon.jit
def expert_of(tile, tiles, TILES: gl.constexpr):
    """The expert of a tile, below 0 for absent ones. A dense product is that of expert 0."""
    if tiles[1] is None:
        return 0
    else:
        return gl.load(tiles[1] + tile // TILES).to(gl.int32)


@gluon.jit
def _load(
    x, x_stride, weight, ring, tiles,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILES: gl.constexpr,
    ROWS: gl.constexpr, TILE_PARTS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Brings the columns of each tile, 128 at a time."""
    GATHER: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    x_ring, w_ring, full, empty = ring
    _, expert_ids, num_rows, num_tiles, top_k = tiles
    NUM_COLUMNS: gl.constexpr = gl.cdiv(OUTPUTS, TILE_PARTS * WIDTH)
    loaded = 0
    for index in range(gl.program_id(0), num_tiles * NUM_COLUMNS, gl.num_programs(0)):
        tile, column = tile_of(index, num_tiles, NUM_COLUMNS, GROUP)
        expert = expert_of(tile, tiles, TILES)
        first_output = expert * OUTPUTS + column * (TILE_PARTS * WIDTH)
        steps = gl.where(expert < 0, 0, gl.cdiv(COLUMNS, WIDTH))
        if expert_ids is not None:
            row = gl.arange(0, ROWS, gl.SliceLayout(1, GATHER))
            choice = rows_of(tile, row, tiles, BLOCK_SIZE, TILES, ROWS)
            place = gl.arange(0, WIDTH, gl.SliceLayout(0, GATHER))
            pointers = x + (choice // top_k).to(gl.int64)[:, None] * x_stride + place[None, :]
            is_choice = (choice < num_rows)[:, None]
        for step in range(steps):
            stage, first = loaded % STAGES, step * WIDTH
            mbarrier.wait(empty.index(stage), loaded // STAGES & 1 ^ 1)
            X_BYTES: gl.constexpr = ROWS * WIDTH if expert_ids is None else 0
            mbarrier.expect(full.index(stage), X_BYTES + TILE_PARTS * WIDTH * WIDTH)
            for part in gl.static_range(TILE_PARTS):
                box = w_ring.index(stage * TILE_PARTS + part)
                tma.async_copy_global_to_shared(
                    weight, [first_output + part * WIDTH, first], full.index(stage), box
                )
            if expert_ids is None:
                tma.async_copy_global_to_shared(x, [tile * ROWS, first], full.index(stage), x_ring.index(stage))
            else:
                inside = is_choice & (first + place < COLUMNS)[None, :]
                async_copy.async_copy_global_to_shared(x_ring.index(stage), pointers + first, inside)
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            loaded += 1


@gluon.jit
def _multiply(
    INDEX: gl.constexpr, ring, staging, tiles, scales, bias, out,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, BY_BLOCKS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILES: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, IN_TURN: gl.constexpr,
):  # fmt: skip
    """The products of one of two warpgroups: half of the rows of each tile, or of its outputs if it has 64 rows."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    FIRST_ROW: gl.constexpr = INDEX * HALF if ROWS > HALF else 0
    FIRST_PART: gl.constexpr = INDEX * PARTS if ROWS == HALF else 0
    TILE_PARTS: gl.constexpr = PARTS * 2 * HALF // ROWS
    NUM_COLUMNS: gl.constexpr = gl.cdiv(OUTPUTS, TILE_PARTS * WIDTH)
    x_ring, w_ring, full, empty = ring
    _, expert_ids, num_rows, num_tiles, top_k = tiles
    weight_scale, ws_expert, ws_row, ws_column, x_scale, xs_row, xs_column = scales
    row = FIRST_ROW + gl.arange(0, HALF, gl.SliceLayout(1, ACC))
    done = 0
    for index in range(gl.program_id(0), num_tiles * NUM_COLUMNS, gl.num_programs(0)):
        tile, column = tile_of(index, num_tiles, NUM_COLUMNS, GROUP)
        expert = expert_of(tile, tiles, TILES)
        first_output = (column * TILE_PARTS + FIRST_PART) * WIDTH
        choice = rows_of(tile, row, tiles, BLOCK_SIZE, TILES, ROWS)
        of_rows = gl.minimum(choice, num_rows - 1) // top_k * xs_row
        of_expert = expert * ws_expert
        steps = gl.where(expert < 0, 0, gl.cdiv(COLUMNS, WIDTH))
        sums = ()
        for part in gl.static_range(PARTS):
            sums += (gl.zeros([HALF, WIDTH], gl.float32, ACC),)
        for step in range(steps):
            stage = done % STAGES
            mbarrier.wait(full.index(stage), done // STAGES & 1)
            if expert_ids is not None:
                hopper.fence_async_shared()  # gathered rows were written by threads, and wgmma reads them
            if BY_BLOCKS:
                of_step = gl.load(x_scale + of_rows + step * xs_column)
            added = ()
            for part in gl.static_range(PARTS):
                product = hopper.warpgroup_mma(
                    x_ring.index(stage).slice(FIRST_ROW, HALF),
                    w_ring.index(stage * TILE_PARTS + FIRST_PART + part).permute((1, 0)),
                    gl.zeros([HALF, WIDTH], gl.float32, ACC), use_acc=False, is_async=True,
                )  # fmt: skip
                if BY_BLOCKS:
                    block = gl.minimum(first_output // WIDTH + part, gl.cdiv(OUTPUTS, WIDTH) - 1)
                    scale = of_step * gl.load(weight_scale + (of_expert + block * ws_row + step * ws_column))
                product = hopper.warpgroup_mma_wait(0, deps=(product,))
                if part == PARTS - 1:
                    mbarrier.arrive(empty.index(stage))
                if BY_BLOCKS:
                    product *= scale[:, None]
                total = sums[part] + product
                if IN_TURN and part < PARTS - 1:
                    total = hopper.warpgroup_mma_wait(0, deps=(total,))
                added += (total,)
            sums = added
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
            _store(
                y, staging.index(INDEX), out, tile, FIRST_ROW, first_output + part * WIDTH, tiles,
                OUTPUTS, BLOCK_SIZE, TILES, ROWS,
            )  # fmt: skip


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
    if INTERPRETED or WGMMA not in _launch.target(call.x.device).features or call.x_scale is None:
        return False
    stored = call.x.dtype is FP8 and call.weight.dtype is FP8 and call.out_dtype.itemsize == OUT_BYTES
    aligned = all(map(_is_aligned, (call.x, call.weight))) and call.x.ndim == 2 and len(call.x)
    return bool(stored and aligned) and (_by_blocks(call) or _by_rows(call))


def scaled_linear(call: Operands, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of the contract of `linear`, for arguments that were checked."""
    out = call.x.new_empty((len(call.x), len(call.weight)), dtype=call.out_dtype)
    launch(call, bias, out, **_launch.parameters("scaled_linear_sm90", call.x.device, len(out)))
    return out


def scaled_grouped_gemm(
    call: Operands,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    order: tuple[torch.Tensor, torch.Tensor],
    top_k: int,
) -> None:
    """Writes the product of the contract of `grouped_gemm` to out. order: sorted_token_ids and expert_ids."""
    block_size = len(order[0]) // len(order[1])
    values = _launch.parameters("scaled_grouped_gemm_sm90", call.x.device, block_size)
    launch(call, bias, out, **values | {"rows": min(values["rows"], block_size)}, order=order, top_k=top_k)


def launch(
    call: Operands,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    rows: int,
    parts: int,
    group: int,
    stages: int,
    in_turn: int,
    order: tuple[torch.Tensor, torch.Tensor] | None = None,
    top_k: int = 1,
) -> None:
    """Writes the product of the contract of `linear`, or of `grouped_gemm` if there is an order, to out.

    rows, parts, group, stages: see the kernel. order: sorted_token_ids and expert_ids.
    """
    (outputs, columns), device = call.weight.shape[-2:], call.x.device
    sorted_token_ids, expert_ids = order or (None, None)
    block_size, tiles = 1, 1
    num_tiles = _launch.cdiv(len(out), rows)
    if order is not None:
        block_size = len(sorted_token_ids) // len(expert_ids)
        tiles = _launch.cdiv(block_size, rows)
        num_tiles = len(expert_ids) * tiles
    width, box = WIDTH.value, NVMMASharedLayout(128, 8, rank=2)
    weight = TensorDescriptor.from_tensor(call.weight.view(-1, columns), [width, width], box)
    x = call.x if order is not None else TensorDescriptor.from_tensor(call.x, [rows, width], box)
    w_strides = (0, *_strides(call.weight_scale)) if order is None else _strides(call.weight_scale)
    tile_outputs = parts * width * (2 * HALF.value // rows)
    num_programs = min(num_tiles * _launch.cdiv(outputs, tile_outputs), _launch.multiprocessors(device))
    scaled_gemm_sm90[(num_programs,)](
        x, call.x.stride(0), weight, bias, out, call.weight_scale, *w_strides, call.x_scale, *_strides(call.x_scale),
        sorted_token_ids, expert_ids, len(out), num_tiles, top_k,
        OUTPUTS=outputs, COLUMNS=columns, BY_BLOCKS=_by_blocks(call), BLOCK_SIZE=block_size, TILES=tiles,
        ROWS=rows, PARTS=parts, GROUP=group, STAGES=stages, IN_TURN=bool(in_turn), num_warps=4, **_launch.launch_options(device),
    )  # fmt: skip


def _strides(scale: torch.Tensor) -> tuple[int, ...]:
    """From scale to scale: 0 where there is one scale."""
    return tuple(0 if size == 1 else stride for size, stride in zip(scale.shape, scale.stride(), strict=True))


def _groups(call: Operands) -> tuple[GroupShape, GroupShape]:
    """Those of the scales of x, and of the weight or of one of its experts."""
    experts = call.weight.ndim == 3
    weight, scale = (call.weight[0], call.weight_scale[0]) if experts else (call.weight, call.weight_scale)
    return group_of(call.x.shape, call.x_scale), group_of(weight.shape, scale)


def _by_blocks(call: Operands) -> bool:
    return _groups(call) == (TOKEN_BLOCKS, BLOCKS)


def _by_rows(call: Operands) -> bool:
    of_x, of_weight = _groups(call)
    return of_x.columns == of_weight.columns == WHOLE and {of_x.rows, of_weight.rows} <= {1, WHOLE}


def _is_aligned(tensor: torch.Tensor) -> bool:
    *strides, last = tensor.stride()
    return last == 1 and not any(place % COPY_BYTES for place in (tensor.data_ptr(), *strides))
