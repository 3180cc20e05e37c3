"""Products of many rows in bf16 and of experts' MXFP4 weights on Hopper GPUs, specialised by warps.

As in `scaled_gemm_sm90`, persistent programs take one tile after the other, and loading warps bring the weights by TMA
and gather the rows of x. Outputs are the rows of the products here: wgmma takes those from registers, so two warpgroups
widen 128 outputs each in registers and nothing of the widened weight is stored. A tile has up to 128 rows of x. Larger
tiles are those of `packed_sm90`.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._products.load_sm90 import (
    GATHERING,
    LOADING_REGISTERS,
    MULTIPLYING_REGISTERS,
    OUTPUTS_OF_BOX,
    barriers,
    box_layout,
    expert_of,
    load_tiles,
    rows_of,
)
from vllm_opset.kernels.triton._products.tiles import Order, tile_of
from vllm_opset.ops.schemes import MXFP4

WIDTH = gl.constexpr(64)  # A stage has so many columns. They are a line of x.
MOST_ROWS = 128  # of a tile: sums of 128 outputs for more do not fit registers
SCALED = gl.constexpr(MXFP4.group.columns)  # So many columns share a scale.
MANTISSA_BITS = gl.constexpr(7)  # The exponent of bf16, which is that of e8m0, lies above them.


@gluon.jit(do_not_specialize=["num_rows", "num_tiles"])
def mxfp4_gemm_sm90(
    x, x_stride, weight, bias, out, weight_scale, ws_expert, ws_row, ws_column, sorted_token_ids, expert_ids,
    num_rows, num_tiles, top_k,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILES: gl.constexpr, ROWS: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Launches at most as many programs as run at a time.

    weight: a TMA descriptor of boxes [OUTPUTS_OF_BOX, WIDTH / 2].
    """
    pdl_wait(PDL)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, WIDTH], gl.NVMMASharedLayout(128, 16, rank=2))
    w_ring = gl.allocate_shared_memory(
        gl.uint8, [2 * STAGES, OUTPUTS_OF_BOX, WIDTH // 2], gl.NVMMASharedLayout(32, 8, rank=2)
    )
    staging = gl.allocate_shared_memory(
        gl.bfloat16, [2, OUTPUTS_OF_BOX, ROWS], gl.NVMMASharedLayout(128, 16, rank=2, transposed=True)
    )
    full, empty = barriers(STAGES, GATHERING)
    ring = (x_ring, w_ring, full, empty)
    tiles = (sorted_token_ids, expert_ids, num_rows, num_tiles, top_k)
    scales = (weight_scale, ws_expert, ws_row, ws_column)
    gl.warp_specialize(
        [
            (_multiply, (0, ring, staging, tiles, scales, bias, out,
                         OUTPUTS, COLUMNS, BLOCK_SIZE, TILES, ROWS, GROUP, STAGES)),
            (_multiply, (1, ring, staging, tiles, scales, bias, out,
                         OUTPUTS, COLUMNS, BLOCK_SIZE, TILES, ROWS, GROUP, STAGES)),
            (load_tiles, (x, x_stride, weight, ring, tiles, OUTPUTS, COLUMNS, BLOCK_SIZE, TILES, 2, GROUP, STAGES,
                          (), ())),
        ],
        [4, 4],
        [MULTIPLYING_REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _scales_at(pointers, step, of_step, is_output, ws_column, COLUMNS: gl.constexpr):
    """The scales of a stage's weights, as bytes."""
    column = step * (WIDTH // SCALED) + of_step
    inside = is_output & (column < COLUMNS // SCALED)[None, :]
    return gl.load(pointers + step * (WIDTH // SCALED) * ws_column, inside, 0)


@gluon.jit
def _multiply(
    INDEX: gl.constexpr, ring, staging, tiles, scales, bias, out,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILES: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The products of one of two warpgroups: half of the outputs of each tile."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    PACKED: gl.constexpr = gl.DotOperandLayout(0, ACC, 1)
    WIDENED: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    NUM_COLUMNS: gl.constexpr = -(-OUTPUTS // (2 * OUTPUTS_OF_BOX))
    x_ring, w_ring, full, empty = ring
    num_rows, num_tiles = tiles[2], tiles[3]
    weight_scale, ws_expert, ws_row, ws_column = scales
    GROUPS: gl.constexpr = (
        gl.full([OUTPUTS_OF_BOX, WIDTH], 0, gl.bfloat16, WIDENED)
        .reshape([OUTPUTS_OF_BOX, WIDTH // SCALED, SCALED])
        .type.layout
    )
    OF_GROUP: gl.constexpr = gl.SliceLayout(2, GROUPS)
    row = gl.arange(0, OUTPUTS_OF_BOX, gl.SliceLayout(1, OF_GROUP))
    of_step = gl.arange(0, WIDTH // SCALED, gl.SliceLayout(0, OF_GROUP))
    done = 0
    for index in range(gl.program_id(0), num_tiles * NUM_COLUMNS, gl.num_programs(0)):
        tile, column = tile_of(index, num_tiles, NUM_COLUMNS, GROUP)
        expert = expert_of(tile, tiles, TILES)
        first_output = (2 * column + INDEX) * OUTPUTS_OF_BOX
        steps = gl.where(expert < 0, 0, gl.cdiv(COLUMNS, WIDTH))
        is_output = ((first_output + row < OUTPUTS) & (expert >= 0))[:, None]
        pointers = weight_scale + expert.to(gl.int64) * ws_expert
        pointers = pointers + ((first_output + row) * ws_row)[:, None] + (of_step * ws_column)[None, :]
        following = _scales_at(pointers, 0, of_step, is_output, ws_column, COLUMNS)
        sums = gl.zeros([OUTPUTS_OF_BOX, ROWS], gl.float32, ACC)
        for step in range(steps):
            stage = done % STAGES
            scale = (following.to(gl.int16) << MANTISSA_BITS).to(gl.bfloat16, bitcast=True)
            following = _scales_at(pointers, step + 1, of_step, is_output, ws_column, COLUMNS)
            mbarrier.wait(full.index(stage), done // STAGES & 1)
            hopper.fence_async_shared()  # gathered rows were written by threads, and wgmma reads them
            widened = gl.fp4_to_fp(w_ring.index(2 * stage + INDEX).load(PACKED), gl.bfloat16, 1)
            widened = widened.reshape([OUTPUTS_OF_BOX, WIDTH // SCALED, SCALED]) * scale[:, :, None]
            widened = gl.convert_layout(widened.reshape([OUTPUTS_OF_BOX, WIDTH]), WIDENED)
            sums = hopper.warpgroup_mma(widened, x_ring.index(stage).permute((1, 0)), sums, is_async=True)
            sums, widened = hopper.warpgroup_mma_wait(0, deps=(sums, widened))
            mbarrier.arrive(empty.index(stage))
            done += 1
        output = first_output + gl.arange(0, OUTPUTS_OF_BOX, gl.SliceLayout(1, ACC))
        if bias is not None:
            inside = (output < OUTPUTS) & (expert >= 0)
            sums += gl.load(bias + expert * OUTPUTS + output, inside, 0.0).to(gl.float32)[:, None]
        LINES: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, 4], [0, 1])
        lines = staging.index(INDEX)
        lines.store(sums.to(gl.bfloat16))
        choice = rows_of(tile, gl.arange(0, ROWS, gl.SliceLayout(0, LINES)), tiles, BLOCK_SIZE, TILES, ROWS)
        output = first_output + gl.arange(0, OUTPUTS_OF_BOX, gl.SliceLayout(1, LINES))
        inside = (choice < num_rows)[None, :] & (output < OUTPUTS)[:, None]
        gl.store(out + choice.to(gl.int64)[None, :] * OUTPUTS + output[:, None], lines.load(LINES), inside)


def mxfp4_grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor,
    out: torch.Tensor,
    order: Order,
    values: _launch.Parameters,
) -> None:
    """Writes the product of the contract of `grouped_gemm` to out. values: the launch's rows, group and stages."""
    (outputs, columns), device = (weight.shape[1], x.shape[1]), x.device
    rows = min(values["rows"], order.block_size)
    tiles = _launch.cdiv(order.block_size, rows)
    num_tiles = len(order.expert_ids) * tiles
    box = [OUTPUTS_OF_BOX.value, WIDTH.value // 2]
    descriptor = TensorDescriptor.from_tensor(weight.view(-1, columns // 2), box, box_layout(32, 8))
    num_programs = min(num_tiles * _launch.cdiv(outputs, 2 * OUTPUTS_OF_BOX.value), _launch.multiprocessors(device))
    _launch.launch(
        mxfp4_gemm_sm90, (num_programs,),
        x, x.stride(0), descriptor, bias, out, weight_scale, *weight_scale.stride(), order.sorted_token_ids,
        order.expert_ids, len(out), num_tiles, order.top_k, OUTPUTS=outputs, COLUMNS=columns,
        BLOCK_SIZE=order.block_size, TILES=tiles, ROWS=rows, GROUP=values["group"], STAGES=values["stages"],
        num_warps=4, **_launch.launch_options(device),
    )  # fmt: skip
