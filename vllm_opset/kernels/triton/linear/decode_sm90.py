"""linear for few tokens on Hopper GPUs, as fast as the weight can be read: in bf16, fp16 and fp8.

Outputs are the rows of wgmma's products and tokens are their columns, so eight tokens need no more products than there
are weights. The copy engine (TMA) brings the weight in units: 128 bytes, or some such lines, of each row of a tile. All
programs take equally many units, one after the other, so few outputs keep all multiprocessors busy as well. Several
programs may share a tile. The last one of them then adds their sums, always in the same order.

By blocks, each product of 128 columns in fp8 starts from zero, and is multiplied by its scales and added in fp32. By
rows, tensor cores add the products, as in `scaled_gemm_sm90`.

Tokens have one tile or several small ones. A launch is the fastest one by the costs of its programs (`launch_of`). It
says which of two kernels takes a call: `decode_sm90`, whose warps load and multiply, or `wide_decode_sm90`.
"""

import functools
import math
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._gluon import barrier
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._products import scaled_calls_sm90
from vllm_opset.kernels.triton._products.counters import zeros
from vllm_opset.kernels.triton._products.load_sm90 import LINE, available, box_layout, is_aligned, most_registers
from vllm_opset.kernels.triton._products.scaled_calls_sm90 import Operands, by_blocks, strides
from vllm_opset.kernels.triton._products.scaled_gemm_sm90 import WIDTH as BLOCK
from vllm_opset.kernels.triton._products.shared_tiles import Costs, costs_of, fastest_run
from vllm_opset.kernels.triton._rows import num_rows
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
from vllm_opset.kernels.triton.linear.wide_decode_sm90 import WARPGROUPS, WARPS, wide_decode_sm90

TILES = (8, 16, 32, 64)  # The tokens of a tile. wgmma takes eight columns of a product or more.
BY_TOKENS = "tokens_linear_decode_sm90"  # the launch parameters that say which calls this kernel suits
WARP_ROWS = 16  # A warp multiplies so many rows of the weight.


@gluon.jit(**UNSPECIALISED)
def decode_sm90(
    x, weight, bias, out, weight_scale, ws_row, ws_column, x_scale, xs_row, xs_column, partials, counters,
    num_tokens, num_outputs, num_blocks, tile_units, num_units, run, token_tiles,
    BY_BLOCKS: gl.constexpr, LINES: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A program takes `run` of the num_units units, of which each tile has tile_units.

    token_tiles: how many tiles of tokens each tile of the weight's rows has. They follow one another.
    x, weight: TMA descriptors of boxes of one line. LINES: of each row in a unit. num_blocks: of scales in a row.
    partials, counters: see `sums_of_tile`.
    """
    ROWS: gl.constexpr = weight.block_type.shape[0]
    TOKENS: gl.constexpr = x.block_type.shape[0]
    WIDTH: gl.constexpr = x.block_type.shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, SUM_BYTES * WIDTH // LINE])
    w_ring = gl.allocate_shared_memory(weight.dtype, [STAGES * LINES, ROWS, WIDTH], weight.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES * LINES, TOKENS, WIDTH], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    ring = (w_ring, x_ring, full)
    scales = (weight_scale, ws_row, ws_column, x_scale, xs_row, xs_column)
    sizes = (num_tokens, num_outputs, num_blocks, tile_units, run, token_tiles)
    begin = gl.program_id(0) * run
    end = gl.minimum(begin + run, num_units)
    # The kernel before this one does not write the weight, so this one need not wait for it.
    for stage in range(STAGES):
        load_weight(weight, ring, stage, begin + stage, end, sizes, LINES)
    pdl_wait(PDL)
    for stage in range(STAGES):
        load_x(x, ring, stage, begin + stage, end, sizes, LINES)
    if BY_BLOCKS:
        following = _scales_at(begin, end, scales, sizes, ROWS, LINES, SUMS)
    done = 0
    for tile in range(begin // tile_units, gl.cdiv(end, tile_units)):
        sums = (gl.zeros([ROWS, TOKENS], gl.float32, SUMS),)
        for _ in range(gl.minimum(end, (tile + 1) * tile_units) - gl.maximum(begin, tile * tile_units)):
            stage, unit = done % STAGES, begin + done
            if BY_BLOCKS:  # a unit ahead: loads take longer than a product
                of_unit = following
                following = _scales_at(unit + 1, end, scales, sizes, ROWS, LINES, SUMS)
            mbarrier.wait(full.index(stage), done // STAGES & 1)
            if BY_BLOCKS:
                sums = add_scaled(sums, of_unit, w_ring, x_ring, stage, 0, LINES)
            else:
                sums = add(sums, w_ring, x_ring, stage, 0, LINES)
            barrier()  # All warps have read the stage.
            load_weight(weight, ring, stage, unit + STAGES, end, sizes, LINES)
            load_x(x, ring, stage, unit + STAGES, end, sizes, LINES)
            done += 1
        finish(sums, scales, bias, out, partials, counters, tile, sizes, BY_BLOCKS, 0, 1)


@gluon.jit
def _scales_at(unit, end, scales, sizes, ROWS: gl.constexpr, LINES: gl.constexpr, SUMS: gl.constexpr):
    """The scales of each line of a unit: those of x, and that of the weight. Beyond the end, those of the last unit."""
    weight_scale, ws_row, ws_column, x_scale, xs_row, xs_column = scales
    num_tokens, _, num_blocks, tile_units, _, _ = sizes
    TOKENS: gl.constexpr = SUMS.instr_shape[1]
    unit = gl.minimum(unit, end - 1)
    weight_tile, token_tile = parts_of_tile(unit // tile_units, sizes)
    token = token_tile * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, SUMS))
    found = ()
    for line in gl.static_range(LINES):
        block = gl.minimum(unit % tile_units * LINES + line, num_blocks - 1)
        found += (gl.load(x_scale + token * xs_row + block * xs_column, token < num_tokens, 0.0),)
        found += (gl.load(weight_scale + weight_tile * ROWS // BLOCK * ws_row + block * ws_column),)
    return found


def can(call: Operands) -> bool:
    """Whether a Hopper GPU multiplies these by its own kernel for few tokens."""
    if not num_rows(call.x):
        return False
    if call.weight_scale is not None:
        return scaled_calls_sm90.can(call)
    in_16_bits = call.x.element_size() == 2 and available(call.x.device)
    return in_16_bits and is_aligned(call.weight) and is_aligned(_rows(call.x))


def suits(call: Operands) -> bool:
    """Whether this kernel is the fastest for what it can multiply."""
    values = _launch.parameters(BY_TOKENS, call.x.device, num_rows(call.x))
    if call.weight_scale is None:
        return bool(values["unquantised"])
    longest = values["longest"]
    if longest in (0, math.inf):  # No fp8 product of so many tokens suits it, or every one does.
        return bool(longest)
    chosen = launch_of(call)
    return chosen.at_once and chosen.time <= longest


class Launch(NamedTuple):
    """values: the launch parameters. tokens: of a tile. run: the units of a program. time: in ns, by its costs.

    at_once: whether all tiles can run at the same time.
    """

    values: _launch.Parameters
    tokens: int
    run: int
    time: float
    at_once: bool


def launch_of(call: Operands) -> Launch:
    """The fastest launch for a call that this kernel can multiply.

    Numbers of tokens between two sizes of the warm-up have the launch of the larger one.
    """
    scheme = "" if call.weight_scale is None else "blocks_" if by_blocks(call) else "rows_"
    num_tokens, (outputs, columns) = num_rows(call.x), call.weight.shape
    counted = min(_launch.next_power_of_2(num_tokens), _launch.bound(BY_TOKENS, call.x.device, num_tokens))
    lines = _launch.cdiv(columns * call.x.element_size(), LINE.value)
    launch = f"{scheme}linear_decode_sm90"
    find = _fastest.__wrapped__ if _launch.is_tried(launch) else _fastest
    return find(launch, call.x.device, counted, outputs, lines)


@functools.lru_cache(4096)
def _fastest(launch: str, device: torch.device, num_tokens: int, outputs: int, lines: int) -> Launch:
    """The fastest launch by the costs of its programs. lines: of a row of the weight.

    The tiles of tokens are the smallest that hold all of them, or several smaller ones.
    """
    whole = next((tile for tile in TILES if tile >= num_tokens), TILES[-1])
    tiles = [tile for tile in reversed(TILES) if tile <= whole]  # `tune` takes the first one for the size of a call
    launches = (_by_tile(tile, launch, device, num_tokens, outputs, lines) for tile in tiles)
    return min(
        (one for one in launches if one.tokens == whole or (one.at_once and num_tokens >= one.values["several_from"])),
        key=lambda one: one.time,
    )


def _by_tile(tile: int, launch: str, device: torch.device, num_tokens: int, outputs: int, lines: int) -> Launch:
    """The fastest launch with so many tokens in a tile."""
    values = _launch.parameters(launch, device, tile)
    tiles = _launch.cdiv(outputs, values["rows"]) * _launch.cdiv(num_tokens, tile)
    programs = values["programs"] * _launch.multiprocessors(device)
    time, run = fastest_run(tiles, _launch.cdiv(lines, values["lines"]), programs, costs_of(Costs, values))
    return Launch(values, tile, run, time, at_once=tiles <= programs)


def decode_linear(call: Operands, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of the contract, for arguments that were checked."""
    x, weight, weight_scale, x_scale, out_dtype = call
    of_blocks, rows, (num_outputs, columns) = weight_scale is not None and by_blocks(call), _rows(x), weight.shape
    num_tokens = rows.shape[0]  # len(rows) takes PyTorch several times as long
    values, tokens, run, _, _ = launch_of(call)
    width, token_tiles = LINE.value // x.element_size(), _launch.cdiv(num_tokens, tokens)
    tiles = _launch.cdiv(num_outputs, values["rows"]) * token_tiles
    tile_units = _launch.cdiv(columns, width * values["lines"])
    num_programs = _launch.cdiv(tiles * tile_units, run)
    out = x.new_empty((*x.shape[:-1], num_outputs), dtype=out_dtype or x.dtype)
    partials = x.new_empty((2 * num_programs, values["rows"], tokens), dtype=torch.float32)
    kernel, warps, limit = decode_sm90, values["rows"] // WARP_ROWS, {}
    if values["wide"]:
        kernel, warps = wide_decode_sm90, WARPS
    else:
        limit = {"maxnreg": most_registers(warps, values["programs"])}
    box = box_layout(128, 8 * x.element_size())
    of_weight, of_x = ((0, 0) if scale is None else strides(scale) for scale in (weight_scale, x_scale))
    _launch.launch(
        kernel, (num_programs,),
        TensorDescriptor.from_tensor(rows, [tokens, width], box),
        TensorDescriptor.from_tensor(weight, [values["rows"], width], box),
        bias, out, weight_scale, *of_weight, x_scale, *of_x, partials, zeros(x.device, tiles * WARPGROUPS.value),
        num_tokens, num_outputs, _launch.cdiv(columns, BLOCK.value), tile_units, tiles * tile_units, run,
        token_tiles, BY_BLOCKS=of_blocks, LINES=values["lines"], STAGES=values["stages"],
        num_warps=warps, **limit, **_launch.launch_options(x.device),
    )  # fmt: skip
    return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])
