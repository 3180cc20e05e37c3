"""Products of few choices in bf16 by experts' MXFP4 weights on Hopper GPUs, as fast as the weights can be read.

Outputs are the rows of wgmma's products, which it takes from registers, and a block's choices are their columns. The
copy engine (TMA) brings packed weights in units of WIDTH columns of a tile. A thread widens 16 bytes of a row at a
time, which share one scale. The order of their columns is not that of wgmma, so x is stored in their order.

All programs take equally many units of the blocks that have an expert, one after the other. Several programs may share
a tile. The last one of them then adds their sums, always in the same order.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._counters import barrier, zeros
from vllm_opset.kernels.triton._decode_sm90 import most_registers
from vllm_opset.kernels.triton._decode_tiles_sm90 import partial_of, place_of
from vllm_opset.kernels.triton._fp4_sm90 import SUMS_FACTOR, WIDTH, WORDS, reordered, scale_pairs, widened, words_of
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._load_sm90 import available, is_aligned
from vllm_opset.kernels.triton._tiles import Order
from vllm_opset.ops.schemes import MXFP4, is_mxfp4

TOKENS = gl.constexpr(16)  # the columns of a product, and the most choices of a block
SCALED = gl.constexpr(MXFP4.group.columns)  # So many columns share a scale.
GROUPS = gl.constexpr(WIDTH.value // SCALED.value)  # of a unit's columns
COUNTED = gl.constexpr(256)  # So many blocks are counted at a time.
OF_FIRST_LANE = gl.constexpr("shfl.sync.idx.b32 $0, $1, 0, 31, -1;")


@gluon.jit(do_not_specialize=["num_choices", "num_blocks"])
def experts_decode_sm90(
    x, x_stride, weight, bias, out, weight_scale, ws_expert, ws_row, ws_column, sorted_token_ids, expert_ids,
    partials, counters, num_choices, num_blocks, top_k,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """weight: a TMA descriptor of boxes of a unit's words. partials, counters: see `_finish`."""
    pdl_wait(PDL)
    ROWS: gl.constexpr = weight.block_type.shape[0]
    TILES: gl.constexpr = (OUTPUTS + ROWS - 1) // ROWS
    UNITS: gl.constexpr = (COLUMNS + WIDTH - 1) // WIDTH
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    w_ring = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, WORDS], weight.layout)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [2, TOKENS, WIDTH], gl.NVMMASharedLayout(128, 16, rank=2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    ring, order = (w_ring, full), (sorted_token_ids, expert_ids, num_choices)
    filled = _filled(expert_ids, num_blocks)
    num_units = filled * TILES * UNITS
    run = gl.cdiv(num_units, gl.num_programs(0))
    begin = gl.program_id(0) * run
    end = gl.minimum(begin + run, num_units)
    for stage in range(STAGES):
        _load(weight, ring, stage, begin + stage, end, expert_ids, OUTPUTS, TILES, UNITS)
    # Blocks of absent experts follow, then those without choices.
    for block in range(filled + gl.program_id(0), num_blocks, gl.num_programs(0)):
        if gl.load(sorted_token_ids + block * BLOCK_SIZE) < num_choices:
            _store_zeros(out, block, order, ROWS, OUTPUTS, BLOCK_SIZE)
    done = 0
    for tile in range(begin // UNITS, gl.cdiv(end, UNITS)):
        block, first_output = tile // TILES, tile % TILES * ROWS
        expert = gl.load(expert_ids + block).to(gl.int64)
        rows = _rows_of(x, x_stride, block, order, top_k, BLOCK_SIZE)
        scales = _scales_of(weight_scale + expert * ws_expert, ws_row, ws_column, first_output, ROWS, OUTPUTS)
        first_step = gl.maximum(begin - tile * UNITS, 0)
        last_step = gl.minimum(end - tile * UNITS, UNITS) - 1
        x_ring.index(done & 1).store(reordered(_x_at(rows, first_step, COLUMNS)))
        following = _x_at(rows, gl.minimum(first_step + 1, last_step), COLUMNS)
        scale = _scales_at(scales, gl.minimum(first_step + 1, last_step), ws_column, COLUMNS)
        mbarrier.wait(full.index(done % STAGES), done // STAGES & 1)
        words = words_of(w_ring.index(done % STAGES))
        factor = widened(words, _scales_at(scales, first_step, ws_column, COLUMNS), FACTOR)
        hopper.fence_async_shared()  # Threads wrote x, and wgmma reads it.
        barrier()
        _load(weight, ring, done % STAGES, begin + done + STAGES, end, expert_ids, OUTPUTS, TILES, UNITS)
        sums = gl.zeros([ROWS, TOKENS], gl.float32, SUMS)
        for step in range(first_step, last_step):
            product = hopper.warpgroup_mma(factor, x_ring.index(done & 1).permute((1, 0)), sums, is_async=True)
            done += 1
            x_ring.index(done & 1).store(reordered(following))
            hopper.fence_async_shared()
            mbarrier.wait(full.index(done % STAGES), done // STAGES & 1)
            words, scale_of_words = words_of(w_ring.index(done % STAGES)), scale
            # A unit ahead: loads take longer than a product.
            following = _x_at(rows, gl.minimum(step + 2, last_step), COLUMNS)
            scale = _scales_at(scales, gl.minimum(step + 2, last_step), ws_column, COLUMNS)
            # The words wait too: widened beside the product, they would need twice as many registers.
            sums, words = hopper.warpgroup_mma_wait(0, deps=(product, words))
            _load(weight, ring, done % STAGES, begin + done + STAGES, end, expert_ids, OUTPUTS, TILES, UNITS)
            factor = widened(words, scale_of_words, FACTOR)
        sums = hopper.warpgroup_mma(factor, x_ring.index(done & 1).permute((1, 0)), sums, is_async=True)
        sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
        done += 1
        place = (tile, block, first_output, expert)
        _finish(sums, bias, out, partials, counters, place, order, run, OUTPUTS, UNITS, BLOCK_SIZE)


@gluon.jit
def _filled(expert_ids, num_blocks):
    """The number of blocks that have an expert. They come first."""
    lane = gl.arange(0, COUNTED, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
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
    tma.async_copy_global_to_shared(weight, corner, full.index(stage), w_ring.index(stage), pred=unit < end)


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
def _scales_of(weight_scale, ws_row, ws_column, first_output, ROWS: gl.constexpr, OUTPUTS: gl.constexpr):
    """Pointers to the scales of a unit's groups, and the groups. Rows beyond the last output are not stored."""
    row, group = scale_pairs(ROWS)
    output = gl.minimum(first_output + row, OUTPUTS - 1)
    return weight_scale + (output * ws_row)[:, None] + (group * ws_column)[None, :], group


@gluon.jit
def _scales_at(scales, step, ws_column, COLUMNS: gl.constexpr):
    pointers, group = scales
    inside = (step * GROUPS + group < COLUMNS // SCALED)[None, :]
    return gl.load(pointers + step * GROUPS * ws_column, inside, 0)


@gluon.jit
def _finish(
    sums, bias, out, partials, counters, place, order, run,
    OUTPUTS: gl.constexpr, UNITS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Stores the results of a tile, if this is its only program or the last one.

    partials: room for two tiles of each program. counters: zero for each tile, and zero again afterwards.
    """
    SUMS: gl.constexpr = sums.type.layout
    tile, program = place[0], gl.program_id(0)
    first, last = tile * UNITS // run, (tile * UNITS + UNITS - 1) // run
    is_last = first == last
    if first != last:
        gl.store(partial_of(partials, sums, place_of(program, tile * UNITS, run)), sums)
        barrier()  # all threads' stores come before the count
        is_last = gl.atomic_add(counters + tile, 1, sem="acq_rel") == last - first
    if is_last:
        if first != last:
            gl.store(counters + tile, 0)
            sums = gl.zeros(sums.shape, gl.float32, SUMS)
            for other in range(first, last + 1):
                sums += gl.load(partial_of(partials, sums, place_of(other, tile * UNITS, run)), cache_modifier=".cg")
        _store(sums, bias, out, place, order, OUTPUTS, BLOCK_SIZE)


@gluon.jit
def _store(sums, bias, out, place, order, OUTPUTS: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    SUMS: gl.constexpr = sums.type.layout
    ROWS: gl.constexpr = sums.shape[0]
    _, block, first_output, expert = place
    sums *= SUMS_FACTOR
    if bias is not None:
        output = first_output + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
        sums += gl.load(bias + expert * OUTPUTS + output, output < OUTPUTS, 0.0).to(gl.float32)[:, None]
    WHOLE: gl.constexpr = _whole(ROWS, gl.num_warps())
    pointers, inside = _results(out, block, first_output, order, ROWS, OUTPUTS, BLOCK_SIZE)
    gl.store(pointers, gl.convert_layout(sums.to(gl.bfloat16), WHOLE), inside)


@gluon.constexpr_function
def _whole(rows, warps):
    """A thread writes 16 bytes of a choice's results."""
    return gl.BlockedLayout([8, 1], [min(rows // 8, 32), max(256 // rows, 1)], [1, warps], [0, 1])


@gluon.jit
def _results(out, block, first_output, order, ROWS: gl.constexpr, OUTPUTS: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Pointers to the results of a tile, and which of them there are."""
    WHOLE: gl.constexpr = _whole(ROWS, gl.num_warps())
    sorted_token_ids, _, num_choices = order
    row = gl.arange(0, TOKENS, gl.SliceLayout(0, WHOLE))
    choice = gl.load(sorted_token_ids + block * BLOCK_SIZE + row, row < BLOCK_SIZE, num_choices)
    output = first_output + gl.arange(0, ROWS, gl.SliceLayout(1, WHOLE))
    pointers = out + choice.to(gl.int64)[None, :] * OUTPUTS + output[:, None]
    return pointers, (choice < num_choices)[None, :] & (output < OUTPUTS)[:, None]


@gluon.jit
def _store_zeros(out, block, order, ROWS: gl.constexpr, OUTPUTS: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Absent experts have no weights, and the results of their choices are zero."""
    nothing = gl.zeros([ROWS, TOKENS], gl.bfloat16, _whole(ROWS, gl.num_warps()))
    for first_output in range(0, OUTPUTS, ROWS):
        pointers, inside = _results(out, block, first_output, order, ROWS, OUTPUTS, BLOCK_SIZE)
        gl.store(pointers, nothing, inside)


def can(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None, block_size: int) -> bool:
    """Whether a Hopper GPU multiplies blocks of so many choices by these weights by its own kernel for few choices."""
    if not available(x.device) or not is_mxfp4(weight, weight_scale) or block_size > TOKENS.value:
        return False
    # `fused_experts` leaves scales by rows if one is too large. Whoever calls this kernel alone has not asked.
    if weight_scale.stride(1) != 1:
        return False
    # Triton 3.6 does not compile it for rows of a single unit.
    return 2 * weight.shape[-1] > WIDTH.value and is_aligned(x) and is_aligned(weight)


def decode_experts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor,
    out: torch.Tensor,
    order: Order,
    values: _launch.Parameters,
) -> None:
    """Writes the product of the contract of `grouped_gemm` to out. values: the launch's rows, warps and so on."""
    (_, outputs, half), device, num_blocks = weight.shape, x.device, len(order.expert_ids)
    rows, warps = values["rows"], values["warps"]
    num_tiles, tile_units = num_blocks * _launch.cdiv(outputs, rows), _launch.cdiv(2 * half, WIDTH.value)
    num_programs = min(values["programs"] * _launch.multiprocessors(device), num_tiles * tile_units)
    words = weight.view(-1, half).view(torch.int32)
    experts_decode_sm90[(num_programs,)](
        x, x.stride(0), TensorDescriptor.from_tensor(words, [rows, WORDS.value], NVMMASharedLayout(64, 32, rank=2)),
        bias, out, weight_scale, *weight_scale.stride(), order.sorted_token_ids, order.expert_ids,
        x.new_empty((2 * num_programs, rows, TOKENS.value), dtype=torch.float32), zeros(device, num_tiles), len(out),
        num_blocks, order.top_k, OUTPUTS=outputs, COLUMNS=2 * half, BLOCK_SIZE=order.block_size,
        STAGES=values["stages"], num_warps=warps,
        maxnreg=most_registers(warps, values["programs"]), **_launch.launch_options(device),
    )  # fmt: skip
