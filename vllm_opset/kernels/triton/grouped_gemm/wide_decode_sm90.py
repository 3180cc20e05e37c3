"""Products of few choices in 16 bits by experts' int4 weights on Hopper GPUs, for groups of 128 columns and more.

A weight becomes the low bits of a fraction, and no zero point is subtracted from it. So the value in 16 bits is larger
than the weight by EXCESS. The sum of x times the excess and the zero point is subtracted from the sum of a group, which
is then multiplied by the group's scale. So eight weights take seven instructions. An infinity in
x is subtracted from itself, and results in NaN.

Outputs are the rows of the products, and a block's choices are their columns. Another kernel first copies the rows of a
block's choices, in the order of columns in which threads have the weights. So the copy engine (TMA) can bring both
factors. A loading warp starts it. Two warpgroups multiply, each warp by its own instructions (mma), since those of a
warpgroup (wgmma) are not faster for so few columns.

All programs take equally many units of the blocks that have an expert, one after the other, as in
`decode_sm90`.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._gluon import tma_load
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._products.counters import zeros
from vllm_opset.kernels.triton._products.int4 import NO_ZERO_POINT, scale_columns
from vllm_opset.kernels.triton._products.load_sm90 import available, barriers, box_layout, is_aligned, most_registers
from vllm_opset.kernels.triton._products.tiles import Order
from vllm_opset.kernels.triton._products.words_sm90 import WIDTH, WORDS, factor_of, reordered, words_of
from vllm_opset.kernels.triton.grouped_gemm.decode_sm90 import filled_blocks, finish
from vllm_opset.kernels.triton.grouped_gemm.packed_sm90 import Packed
from vllm_opset.ops.schemes import PACKED, is_mxfp4

WARPGROUPS = gl.constexpr(2)  # that multiply
WARPS = 12  # of a program: those, and a warpgroup with the loading warp
LOADING_REGISTERS = gl.constexpr(24)
BLOCK_SIZES = (8, 16)  # The products of a warp have eight columns.
ARRANGED_UNITS = 8  # of a program that copies rows


def _pairs(shifts: tuple[str, ...], mask: str, excess: str) -> str:
    """PTX that makes the eight weights of a word four pairs in 16 bits. A pair has the values i and i + 4."""
    code = ""
    for number, shift in enumerate(shifts):
        pair = f"{{${2 * number}, ${2 * number + 1}}}"
        code += f"{shift} lop3.b32 pair, pair, {mask}, {excess}, 0xEA; mov.b32 {pair}, pair;"
    return f"{{.reg .b32 pair; {code}}}"


# How much more a value in 16 bits is than its weight. fp16 has room for the weight above its lowest bits. An excess of
# 1,024 in the lowest would save two shifts, and cost four bits of the sums.
EXCESS_BF16, EXCESS_FP16 = gl.constexpr(128.0), gl.constexpr(64.0)
PAIRS_BF16 = gl.constexpr(
    _pairs(
        ("mov.b32 pair, $8;", "shr.u32 pair, $8, 4;", "shr.u32 pair, $8, 8;", "shr.u32 pair, $8, 12;"),
        mask="0x000F000F", excess="0x43004300",
    )
)  # fmt: skip
PAIRS_FP16 = gl.constexpr(
    _pairs(
        ("shl.b32 pair, $8, 4;", "mov.b32 pair, $8;", "shr.u32 pair, $8, 4;", "shr.u32 pair, $8, 8;"),
        mask="0x00F000F0", excess="0x54005400",
    )
)  # fmt: skip
REGISTERS = gl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r")


@gluon.jit(do_not_specialize=["num_choices", "num_blocks", "num_places"])
def int4_experts_decode_sm90(
    x, x_sum, weight, bias, out, weight_scale, zero_point, ws_expert, ws_row, ws_column, sorted_token_ids, expert_ids,
    partials, counters, num_choices, num_blocks, num_places,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, SCALED_COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    MULTIPLYING: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """x, weight: TMA descriptors of a unit's boxes. x and x_sum are what `_arrange_by_expert` writes.

    MULTIPLYING: the registers of a thread that multiplies. For the rest, see `experts_decode_sm90`.
    """
    ROWS: gl.constexpr = weight.block_type.shape[0]
    TOKENS: gl.constexpr = x.block_type.shape[0]
    w_ring = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, WORDS], weight.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, TOKENS, WIDTH], x.layout)
    full, empty = barriers(STAGES, 0, WARPGROUPS)
    ring = (w_ring, x_ring, full, empty)
    # The kernel before this one arranges x. It waits first, so experts and weights are older, and need no wait.
    num_units = filled_blocks(expert_ids, num_blocks) * _cdiv(OUTPUTS, ROWS) * _cdiv(COLUMNS, WIDTH)
    run = gl.cdiv(num_units, gl.num_programs(0))
    begin = gl.program_id(0) * run
    units = (begin, gl.minimum(begin + run, num_units), run)
    order = (sorted_token_ids, expert_ids, num_choices)
    scales = (weight_scale, zero_point, ws_expert, ws_row, ws_column, x_sum, num_places)
    results = (bias, out, partials, counters)
    gl.warp_specialize(
        [
            (_multiply, (0, ring, units, order, scales, results, OUTPUTS, COLUMNS, SCALED_COLUMNS, PDL)),
            (_multiply, (1, ring, units, order, scales, results, OUTPUTS, COLUMNS, SCALED_COLUMNS, PDL)),
            (_load, (x, weight, ring, units, expert_ids, OUTPUTS, COLUMNS, PDL)),
        ],
        [4, 1],
        [MULTIPLYING, LOADING_REGISTERS],
    )


@gluon.constexpr_function
def _cdiv(a, b):
    return -(-a // b)


@gluon.jit
def _load(x, weight, ring, units, expert_ids, OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, PDL: gl.constexpr):
    """The loading warp."""
    w_ring, x_ring, full, empty = ring
    begin, end, _ = units
    STAGES: gl.constexpr = w_ring.shape[0]
    TILES: gl.constexpr = _cdiv(OUTPUTS, w_ring.shape[1])
    UNITS: gl.constexpr = _cdiv(COLUMNS, WIDTH)
    for stage in range(STAGES):
        _load_weight(weight, ring, stage, begin + stage, end, expert_ids, OUTPUTS, TILES, UNITS)
    pdl_wait(PDL)
    for unit in range(begin, end):
        done = unit - begin
        stage = done % STAGES
        if done >= STAGES:
            mbarrier.wait(empty.index(stage), done // STAGES & 1 ^ 1)
            _load_weight(weight, ring, stage, unit, end, expert_ids, OUTPUTS, TILES, UNITS)
        row = unit // (TILES * UNITS) * x_ring.shape[1]
        tma_load(x, [row, unit % UNITS * WIDTH], full.index(stage), x_ring.index(stage))


@gluon.jit
def _load_weight(
    weight, ring, stage, unit, end, expert_ids, OUTPUTS: gl.constexpr, TILES: gl.constexpr, UNITS: gl.constexpr
):
    """Lets the stage's barrier await a unit of both factors, if there is one, and brings the weights."""
    w_ring, x_ring, full, _ = ring
    ROWS: gl.constexpr = w_ring.shape[1]
    BYTES: gl.constexpr = ROWS * WORDS * 4 + x_ring.shape[1] * WIDTH * 2
    tile, exists = unit // UNITS, unit < end
    expert = gl.load(expert_ids + tile // TILES, exists, 0).to(gl.int32)
    mbarrier.expect(full.index(stage), BYTES, pred=exists)
    corner = [expert * OUTPUTS + tile % TILES * ROWS, unit % UNITS * WORDS]
    tma_load(weight, corner, full.index(stage), w_ring.index(stage), pred=exists)


@gluon.jit
def _multiply(
    INDEX: gl.constexpr, ring, units, order, scales, results,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, SCALED_COLUMNS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The products of one warpgroup, for its part of the rows of each tile."""
    w_ring, x_ring, full, empty = ring
    bias, out, partials, counters = results
    begin, end, run = units
    STAGES: gl.constexpr = w_ring.shape[0]
    TILE_ROWS: gl.constexpr = w_ring.shape[1]
    ROWS: gl.constexpr = TILE_ROWS // WARPGROUPS
    TOKENS: gl.constexpr = x_ring.shape[1]
    TILES: gl.constexpr = _cdiv(OUTPUTS, TILE_ROWS)
    UNITS: gl.constexpr = _cdiv(COLUMNS, WIDTH)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    pdl_wait(PDL)
    done = 0
    for tile in range(begin // UNITS, gl.cdiv(end, UNITS)):
        block, first_output = tile // TILES, tile % TILES * TILE_ROWS + INDEX * ROWS
        expert = gl.load(order[1] + block).to(gl.int64)
        pointers = _scale_pointers(scales, block, expert, first_output, ROWS, TOKENS, OUTPUTS, SUMS)
        first_step = gl.maximum(begin - tile * UNITS, 0)
        last_step = gl.minimum(end - tile * UNITS, UNITS) - 1
        following = _scales_at(pointers, first_step, COLUMNS, SCALED_COLUMNS)
        sums = gl.zeros([ROWS, TOKENS], gl.float32, SUMS)
        for step in range(first_step, last_step + 1):
            of_unit, stage = following, done % STAGES
            # Before the wait, since these loads take longer than a product.
            following = _scales_at(pointers, gl.minimum(step + 1, last_step), COLUMNS, SCALED_COLUMNS)
            mbarrier.wait(full.index(stage), done // STAGES & 1)
            sums = _add(sums, w_ring.index(stage).slice(INDEX * ROWS, ROWS), x_ring.index(stage), of_unit)
            mbarrier.arrive(empty.index(stage))
            done += 1
        finish(
            sums, bias, out, partials, counters, (tile, block, first_output, expert), order, run,
            OUTPUTS, UNITS, TOKENS, INDEX, WARPGROUPS,
        )  # fmt: skip


@gluon.jit
def _scale_pointers(
    scales, block, expert, first_output,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, OUTPUTS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Pointers to a tile's sums of x, its scales, and its zero points if there are any. Also the distances of columns.

    Rows beyond the last output are not stored.
    """
    weight_scale, zero_point, ws_expert, ws_row, ws_column, x_sum, num_places = scales
    output = gl.minimum(first_output + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS)), OUTPUTS - 1)
    place = block * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, SUMS))
    offset = expert * ws_expert + output * ws_row
    strides = (ws_column, num_places)
    if zero_point is None:
        return strides, x_sum + place, weight_scale + offset
    else:
        return strides, x_sum + place, weight_scale + offset, zero_point + offset


@gluon.jit
def _scales_at(pointers, step, COLUMNS: gl.constexpr, SCALED_COLUMNS: gl.constexpr):
    """What `_scale_pointers` point to, for a unit."""
    ws_column, num_places = pointers[0]
    found = (gl.load(pointers[1] + step * num_places),)
    for number in gl.static_range(2, len(pointers)):
        found += (gl.load(pointers[number] + step * WIDTH // SCALED_COLUMNS * ws_column),)
    return found


@gluon.jit
def _add(sums, w, x, of_unit):
    """Adds the products of a unit. of_unit: what `_scales_at` found."""
    SUMS: gl.constexpr = sums.type.layout
    BF16: gl.constexpr = x.dtype == gl.bfloat16
    EXCESS: gl.constexpr = EXCESS_BF16 if BF16 else EXCESS_FP16
    PAIRS: gl.constexpr = PAIRS_BF16 if BF16 else PAIRS_FP16
    pairs = gl.inline_asm_elementwise(PAIRS, REGISTERS, [words_of(w)], (x.dtype,) * 8, True, 1)
    factor = factor_of(pairs, gl.DotOperandLayout(0, SUMS, 2))
    x = x.permute((1, 0)).load(gl.DotOperandLayout(1, SUMS, 2))
    product = mma_v2(factor, x, gl.zeros(sums.shape, gl.float32, SUMS))
    if len(of_unit) == 2:
        product -= ((NO_ZERO_POINT + EXCESS) * of_unit[0])[None, :]
    else:
        product -= (of_unit[2].to(gl.float32) + EXCESS)[:, None] * of_unit[0][None, :]
    return sums + product * of_unit[1].to(gl.float32)[:, None]


@triton.jit(do_not_specialize=["num_choices", "num_places"])
def _arrange_by_expert(
    x, x_stride, arranged, sums, sorted_token_ids, num_choices, num_places, top_k,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copies the rows of choices by their places, with the columns of a unit in the order of `words_sm90`.

    BLOCK: the units of a program. arranged: [places, units * WIDTH]. sums: of a unit's columns, [units, places].
    Nothing is written for places without a choice.
    """
    pdl_wait(PDL)
    UNITS: tl.constexpr = (COLUMNS + WIDTH - 1) // WIDTH
    place = tl.program_id(0)
    choice = tl.load(sorted_token_ids + place)
    if choice < num_choices:
        unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        column = unit[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        value = tl.load(x + (choice // top_k).to(tl.int64) * x_stride + column, column < COLUMNS, 0.0)
        tl.store(sums + unit * num_places + place, tl.sum(value.to(tl.float32), 1), unit < UNITS)
        value = reordered(value, True)
        tl.store(arranged + place.to(tl.int64) * (UNITS * WIDTH) + column, value, (unit < UNITS)[:, None])


def can(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None, block_size: int) -> bool:
    """Whether a Hopper GPU multiplies blocks of so many choices by these weights by this kernel."""
    if weight.dtype is not PACKED or is_mxfp4(weight, weight_scale) or not available(x.device):
        return False
    if block_size not in BLOCK_SIZES or x.element_size() != 2 or not is_aligned(weight):
        return False
    group, columns = scale_columns(weight[0], weight_scale[0]), 2 * weight.shape[-1]
    # Triton 3.6 does not compile it for rows of a single unit.
    return columns > WIDTH.value and (group % WIDTH.value == 0 or group == columns)


def decode_experts(call: Packed, bias: torch.Tensor | None, out: torch.Tensor, order: Order) -> None:
    """Writes the product of the contract of `grouped_gemm` to out."""
    (x, weight, weight_scale, zero_point), num_blocks, tokens = call, order.num_blocks, order.block_size
    (_, outputs, half), device = weight.shape, x.device
    values = _launch.parameters("int4_grouped_gemm_wide_decode_sm90", device, tokens)
    rows = values["rows"]
    columns, units, places = 2 * half, _launch.cdiv(2 * half, WIDTH.value), len(order.sorted_token_ids)
    arranged = x.new_empty((places, units * WIDTH.value))
    x_sum = x.new_empty((units, places), dtype=torch.float32)
    options, block = _launch.launch_options(device), min(ARRANGED_UNITS, _launch.next_power_of_2(units))
    _launch.launch(
        _arrange_by_expert, (places, _launch.cdiv(units, block)),
        x, x.stride(0), arranged, x_sum, order.sorted_token_ids, len(out), places, order.top_k,
        COLUMNS=columns, BLOCK=block, num_warps=min(4, block), **options,
    )  # fmt: skip
    num_tiles = num_blocks * _launch.cdiv(outputs, rows)
    num_programs = min(values["programs"] * _launch.multiprocessors(device), num_tiles * units)
    words, registers = weight.view(-1, half).view(torch.int32), most_registers(WARPS, values["programs"])
    _launch.launch(
        int4_experts_decode_sm90, (num_programs,),
        TensorDescriptor.from_tensor(arranged, [tokens, WIDTH.value], box_layout(128, 16)), x_sum,
        TensorDescriptor.from_tensor(words, [rows, WORDS.value], box_layout(64, 32)),
        bias, out, weight_scale, zero_point, *weight_scale.stride(), order.sorted_token_ids, order.expert_ids,
        x.new_empty((2 * num_programs, rows, tokens), dtype=torch.float32), zeros(device, 2 * num_tiles), len(out),
        num_blocks, places, OUTPUTS=outputs, COLUMNS=columns, SCALED_COLUMNS=scale_columns(weight[0], weight_scale[0]),
        STAGES=values["stages"], MULTIPLYING=(3 * registers - LOADING_REGISTERS.value) // 16 * 8, num_warps=4,
        maxnreg=registers, **options,
    )  # fmt: skip
