"""Products of few choices in 16 bits by experts' MXFP4 weights, or int4 in small groups, on Hopper GPUs.

Outputs are the rows of wgmma's products, which it takes from registers, and a block's choices are their columns. The
copy engine (TMA) brings packed weights in units of WIDTH columns of a tile. A thread widens 16 bytes of a row at a
time, which share one scale. The order of their columns is not that of wgmma, so x is stored in their order.

All programs take equally many units of the blocks that have an expert, one after the other. Several programs may share
a tile. The last one of them then adds their sums, always in the same order.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._gluon import barrier, tma_load
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._products.counters import zeros
from vllm_opset.kernels.triton._products.int4 import NO_ZERO_POINT, scale_columns
from vllm_opset.kernels.triton._products.int4_words_sm90 import dequantised_words
from vllm_opset.kernels.triton._products.load_sm90 import available, box_layout, is_aligned, most_registers
from vllm_opset.kernels.triton._products.mxfp4_words_sm90 import SUMS_FACTOR, widened
from vllm_opset.kernels.triton._products.shared_tiles import sums_of_tile
from vllm_opset.kernels.triton._products.tiles import Order
from vllm_opset.kernels.triton._products.words_sm90 import GROUPS, WIDTH, WORDS, reordered, rows_and_groups, words_of
from vllm_opset.kernels.triton.grouped_gemm.packed_sm90 import Packed
from vllm_opset.ops.schemes import MXFP4, PACKED, is_mxfp4

TOKENS = gl.constexpr(16)  # the columns of a product, and the most choices of a block
OF_GROUP = gl.constexpr(WIDTH.value // GROUPS.value)  # columns
COUNTED = gl.constexpr(256)  # So many blocks are counted at a time.
OF_FIRST_LANE = gl.constexpr("shfl.sync.idx.b32 $0, $1, 0, 31, -1;")


@gluon.jit(do_not_specialize=["num_choices", "num_blocks"])
def experts_decode_sm90(
    x, x_stride, weight, bias, out, weight_scale, zero_point, ws_expert, ws_row, ws_column, sorted_token_ids,
    expert_ids, partials, counters, num_choices, num_blocks, top_k,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, SCALED_COLUMNS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """weight: a TMA descriptor of boxes of a unit's words. SCALED_COLUMNS: that share a scale.

    partials, counters: see `sums_of_tile`.
    """
    pdl_wait(PDL)
    ROWS: gl.constexpr = weight.block_type.shape[0]
    TILES: gl.constexpr = (OUTPUTS + ROWS - 1) // ROWS
    UNITS: gl.constexpr = (COLUMNS + WIDTH - 1) // WIDTH
    INT4: gl.constexpr = weight_scale.dtype.element_ty != gl.uint8
    dtype: gl.constexpr = out.dtype.element_ty
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    w_ring = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, WORDS], weight.layout)
    x_ring = gl.allocate_shared_memory(dtype, [2, TOKENS, WIDTH], gl.NVMMASharedLayout(128, 16, rank=2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    ring, order = (w_ring, full), (sorted_token_ids, expert_ids, num_choices)
    filled = filled_blocks(expert_ids, num_blocks)
    num_units = filled * TILES * UNITS
    run = gl.cdiv(num_units, gl.num_programs(0))
    begin = gl.program_id(0) * run
    end = gl.minimum(begin + run, num_units)
    for stage in range(STAGES):
        _load(weight, ring, stage, begin + stage, end, expert_ids, OUTPUTS, TILES, UNITS)
    done = 0
    for tile in range(begin // UNITS, gl.cdiv(end, UNITS)):
        block, first_output = tile // TILES, tile % TILES * ROWS
        expert = gl.load(expert_ids + block).to(gl.int64)
        rows = _rows_of(x, x_stride, block, order, top_k, BLOCK_SIZE)
        scales = _scales_of(
            weight_scale, zero_point, expert * ws_expert, ws_row, first_output, ws_column, ROWS, OUTPUTS, SCALED_COLUMNS
        )
        first_step = gl.maximum(begin - tile * UNITS, 0)
        last_step = gl.minimum(end - tile * UNITS, UNITS) - 1
        x_ring.index(done & 1).store(reordered(_x_at(rows, first_step, COLUMNS), INT4))
        following = _x_at(rows, gl.minimum(first_step + 1, last_step), COLUMNS)
        scale = _scales_at(scales, gl.minimum(first_step + 1, last_step), ws_column, COLUMNS, SCALED_COLUMNS)
        mbarrier.wait(full.index(done % STAGES), done // STAGES & 1)
        words = words_of(w_ring.index(done % STAGES))
        factor = _factor(words, _scales_at(scales, first_step, ws_column, COLUMNS, SCALED_COLUMNS), dtype, FACTOR)
        hopper.fence_async_shared()  # Threads wrote x, and wgmma reads it.
        barrier()
        _load(weight, ring, done % STAGES, begin + done + STAGES, end, expert_ids, OUTPUTS, TILES, UNITS)
        sums = gl.zeros([ROWS, TOKENS], gl.float32, SUMS)
        for step in range(first_step, last_step):
            product = hopper.warpgroup_mma(factor, x_ring.index(done & 1).permute((1, 0)), sums, is_async=True)
            done += 1
            x_ring.index(done & 1).store(reordered(following, INT4))
            hopper.fence_async_shared()
            mbarrier.wait(full.index(done % STAGES), done // STAGES & 1)
            words, scale_of_words = words_of(w_ring.index(done % STAGES)), scale
            # A unit ahead: loads take longer than a product.
            following = _x_at(rows, gl.minimum(step + 2, last_step), COLUMNS)
            scale = _scales_at(scales, gl.minimum(step + 2, last_step), ws_column, COLUMNS, SCALED_COLUMNS)
            # The words wait too: widened beside the product, they would need twice as many registers.
            sums, words = hopper.warpgroup_mma_wait(0, deps=(product, words))
            _load(weight, ring, done % STAGES, begin + done + STAGES, end, expert_ids, OUTPUTS, TILES, UNITS)
            factor = _factor(words, scale_of_words, dtype, FACTOR)
        sums = hopper.warpgroup_mma(factor, x_ring.index(done & 1).permute((1, 0)), sums, is_async=True)
        sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
        done += 1
        place = (tile, block, first_output, expert)
        if not INT4:
            sums *= SUMS_FACTOR
        finish(sums, bias, out, partials, counters, place, order, run, OUTPUTS, UNITS, BLOCK_SIZE)


@gluon.constexpr_function
def _in_each_warp(warps):
    """COUNTED numbers in a warp's threads, and the same in all warps: no warp waits for another one's sum."""
    registers = [[32 << bit] for bit in range((COUNTED.value // 32).bit_length() - 1)]
    of_warps = [[0]] * (warps.bit_length() - 1)
    return gl.DistributedLinearLayout(registers, [[1], [2], [4], [8], [16]], of_warps, [], [COUNTED.value])


@gluon.jit
def filled_blocks(expert_ids, num_blocks):
    """The number of blocks that have an expert. They come first."""
    lane = gl.arange(0, COUNTED, _in_each_warp(gl.num_warps()))
    found = 0
    for first in range(0, num_blocks, COUNTED):
        expert = gl.load(expert_ids + first + lane, first + lane < num_blocks, -1)
        found += gl.sum((expert >= 0).to(gl.int32), 0)
    # Now ptxas knows that all threads have the same number, and computes what follows from it once for a warp.
    return gl.inline_asm_elementwise(OF_FIRST_LANE, "=r,r", [found], gl.int32, False, 1)


@gluon.jit
def _load(
    weight, ring, stage, unit, end, expert_ids,
    OUTPUTS: gl.constexpr, TILES: gl.constexpr, UNITS: gl.constexpr,
):  # fmt: skip
    """Brings a unit of the weight, if there is one."""
    w_ring, full = ring
    ROWS: gl.constexpr = w_ring.shape[1]
    tile = unit // UNITS
    expert = gl.load(expert_ids + tile // TILES, unit < end, 0).to(gl.int32)
    corner = [expert * OUTPUTS + tile % TILES * ROWS, unit % UNITS * WORDS]
    mbarrier.expect(full.index(stage), ROWS * WORDS * 4, pred=unit < end)
    tma_load(weight, corner, full.index(stage), w_ring.index(stage), pred=unit < end)


@gluon.jit
def _rows_of(x, x_stride, block, order, top_k, BLOCK_SIZE: gl.constexpr):
    """Pointers to a unit's columns of the rows of a block, and which of them there are. A thread loads 16 bytes."""
    WARPS: gl.constexpr = gl.num_warps()
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    sorted_token_ids, _, num_choices = order
    row = gl.arange(0, TOKENS, gl.SliceLayout(1, LOADED))
    choice = gl.load(sorted_token_ids + block * BLOCK_SIZE + row, row < BLOCK_SIZE, num_choices)
    place = gl.arange(0, WIDTH, gl.SliceLayout(0, LOADED))
    return x + (choice // top_k).to(gl.int64)[:, None] * x_stride + place[None, :], choice < num_choices, place


@gluon.jit
def _x_at(rows, step, COLUMNS: gl.constexpr):
    pointers, is_choice, place = rows
    inside = is_choice[:, None] & (step * WIDTH + place < COLUMNS)[None, :]
    return gl.load(pointers + step * WIDTH, inside, 0.0)


@gluon.jit
def _scales_of(
    weight_scale, zero_point, of_expert, ws_row, first_output, ws_column,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, SCALED_COLUMNS: gl.constexpr,
):  # fmt: skip
    """The groups of a unit, and pointers to their scales, and to the zero points if there are any.

    Rows beyond the last output are not stored. Several groups, and units, may share a scale.
    """
    row, group = rows_and_groups(ROWS)
    offset = of_expert + (gl.minimum(first_output + row, OUTPUTS - 1) * ws_row)[:, None]
    offset += (group * OF_GROUP // SCALED_COLUMNS * ws_column)[None, :]
    if zero_point is None:
        return group, weight_scale + offset
    else:
        return group, weight_scale + offset, zero_point + offset


@gluon.jit
def _scales_at(scales, step, ws_column, COLUMNS: gl.constexpr, SCALED_COLUMNS: gl.constexpr):
    """The scales of a unit's groups, and the zero points if there are any. There is no scale beyond the last column."""
    inside = (step * GROUPS + scales[0] < COLUMNS // OF_GROUP)[None, :]
    first = step * WIDTH // SCALED_COLUMNS if SCALED_COLUMNS > WIDTH else step * (WIDTH // SCALED_COLUMNS)
    found = ()
    for number in gl.static_range(1, len(scales)):
        found += (gl.load(scales[number] + first * ws_column, inside, 0),)
    return found


@gluon.jit
def _factor(words, scale, dtype: gl.constexpr, FACTOR: gl.constexpr):
    """A unit's weights for a product. scale: what `_scales_at` found."""
    if scale[0].dtype == gl.uint8:
        return widened(words, scale[0], FACTOR)
    elif len(scale) == 1:
        zero = gl.full(scale[0].shape, NO_ZERO_POINT, gl.float32, scale[0].type.layout)
        return dequantised_words(words, zero, scale[0].to(dtype), FACTOR)
    else:
        return dequantised_words(words, scale[1].to(gl.float32), scale[0].to(dtype), FACTOR)


@gluon.jit
def finish(
    sums, bias, out, partials, counters, place, order, run,
    OUTPUTS: gl.constexpr, UNITS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    INDEX: gl.constexpr = 0, WARPGROUPS: gl.constexpr = 1,
):  # fmt: skip
    """Stores the results of a tile, if this is its only program or the last one.

    Each of WARPGROUPS parts of the threads does so for its own rows. INDEX: of this one.
    """
    is_last, sums = sums_of_tile((sums,), partials, counters, place[0], UNITS, run, INDEX, WARPGROUPS)
    if is_last:
        _store(sums[0], bias, out, place, order, OUTPUTS, BLOCK_SIZE)


@gluon.jit
def _store(sums, bias, out, place, order, OUTPUTS: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    SUMS: gl.constexpr = sums.type.layout
    ROWS: gl.constexpr = sums.shape[0]
    _, block, first_output, expert = place
    if bias is not None:
        output = first_output + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
        sums += gl.load(bias + expert * OUTPUTS + output, output < OUTPUTS, 0.0).to(gl.float32)[:, None]
    WHOLE: gl.constexpr = _whole(ROWS, gl.num_warps())
    pointers, inside = _results(out, block, first_output, order, ROWS, sums.shape[1], OUTPUTS, BLOCK_SIZE)
    gl.store(pointers, gl.convert_layout(sums.to(out.dtype.element_ty), WHOLE), inside)


@gluon.constexpr_function
def _whole(rows, warps):
    """A thread writes 16 bytes of a choice's results."""
    return gl.BlockedLayout([8, 1], [min(rows // 8, 32), max(256 // rows, 1)], [1, warps], [0, 1])


@gluon.jit
def _results(
    out, block, first_output, order,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, OUTPUTS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Pointers to the results of a tile, and which of them there are."""
    WHOLE: gl.constexpr = _whole(ROWS, gl.num_warps())
    sorted_token_ids, _, num_choices = order
    row = gl.arange(0, TOKENS, gl.SliceLayout(0, WHOLE))
    choice = gl.load(sorted_token_ids + block * BLOCK_SIZE + row, row < BLOCK_SIZE, num_choices)
    output = first_output + gl.arange(0, ROWS, gl.SliceLayout(1, WHOLE))
    pointers = out + choice.to(gl.int64)[None, :] * OUTPUTS + output[:, None]
    return pointers, (choice < num_choices)[None, :] & (output < OUTPUTS)[:, None]


def can(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None, block_size: int) -> bool:
    """Whether a Hopper GPU multiplies blocks of so many choices by these weights by its own kernel for few choices."""
    if weight.dtype is not PACKED or block_size > TOKENS.value or x.element_size() != 2 or not available(x.device):
        return False
    # `fused_experts` leaves scales of MXFP4 by rows if one is too large. Whoever calls this kernel alone has not asked.
    if is_mxfp4(weight, weight_scale) and weight_scale.stride(1) != 1:
        return False
    # Triton 3.6 does not compile it for rows of a single unit.
    return 2 * weight.shape[-1] > WIDTH.value and is_aligned(x) and is_aligned(weight)


def decode_experts(call: Packed, bias: torch.Tensor | None, out: torch.Tensor, order: Order) -> None:
    """Writes the product of the contract of `grouped_gemm` to out."""
    (x, weight, weight_scale, zero_point), num_blocks = call, order.num_blocks
    mxfp4 = is_mxfp4(weight, weight_scale)
    values = _launch.parameters(f"{'mxfp4' if mxfp4 else 'int4'}_grouped_gemm_decode_sm90", x.device, num_blocks)
    (_, outputs, half), device, rows, warps = weight.shape, x.device, values["rows"], values["warps"]
    num_tiles, tile_units = num_blocks * _launch.cdiv(outputs, rows), _launch.cdiv(2 * half, WIDTH.value)
    num_programs = min(values["programs"] * _launch.multiprocessors(device), num_tiles * tile_units)
    words = weight.view(-1, half).view(torch.int32)
    _launch.launch(
        experts_decode_sm90, (num_programs,),
        x, x.stride(0), TensorDescriptor.from_tensor(words, [rows, WORDS.value], box_layout(64, 32)),
        bias, out, weight_scale, zero_point, *weight_scale.stride(), order.sorted_token_ids, order.expert_ids,
        x.new_empty((2 * num_programs, rows, TOKENS.value), dtype=torch.float32), zeros(device, num_tiles), len(out),
        num_blocks, order.top_k, OUTPUTS=outputs, COLUMNS=2 * half,
        SCALED_COLUMNS=MXFP4.group.columns if mxfp4 else scale_columns(weight[0], weight_scale[0]),
        BLOCK_SIZE=order.block_size, STAGES=values["stages"], num_warps=warps,
        maxnreg=most_registers(warps, values["programs"]), **_launch.launch_options(device),
    )  # fmt: skip
