"""linear for few tokens on Hopper GPUs, as fast as the weight can be read: in bf16, fp16 and fp8.

Outputs are the rows of wgmma's products and tokens are their columns, so eight tokens need no more products than there
are weights. The copy engine (TMA) brings the weight in units: 128 bytes, or some such lines, of each row of a tile. All
programs take equally many units, one after the other, so few outputs keep all multiprocessors busy as well. Several
programs may share a tile. The last one of them then adds their sums, always in the same order.

By blocks, each product of 128 columns in fp8 starts from zero, and is multiplied by its scales and added in fp32. By
rows, tensor cores add the products, as in `scaled_gemm_sm90`.

The launch says which of two kernels takes a call: `decode_sm90`, whose warps load and multiply, or `wide_decode_sm90`.
"""

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
from vllm_opset.kernels.triton._products.shared_tiles import run_of
from vllm_opset.kernels.triton._rows import num_rows
from vllm_opset.kernels.triton.linear._decode_tiles_sm90 import SUM_BYTES, add, add_scaled, finish, load_weight, load_x
from vllm_opset.kernels.triton.linear.wide_decode_sm90 import WARPGROUPS, WARPS, wide_decode_sm90

FEWEST_TOKENS = 8  # that wgmma takes as the columns of a product
MOST_TOKENS = 128  # More tokens would need a second tile of x.
WARP_ROWS = 16  # A warp multiplies so many rows of the weight.


@gluon.jit(
    do_not_specialize=[
        "ws_row", "ws_column", "xs_row", "xs_column", "num_tokens", "num_blocks", "tile_units", "num_units", "run",
    ]
)  # fmt: skip
def decode_sm90(
    x, weight, bias, out, weight_scale, ws_row, ws_column, x_scale, xs_row, xs_column, partials, counters,
    num_tokens, num_outputs, num_blocks, tile_units, num_units, run,
    BY_BLOCKS: gl.constexpr, LINES: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A program takes `run` of the num_units units, of which each tile has tile_units.

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
    sizes = (num_tokens, num_outputs, num_blocks, tile_units, run)
    begin = gl.program_id(0) * run
    end = gl.minimum(begin + run, num_units)
    # The kernel before this one does not write the weight, so this one need not wait for it.
    for stage in range(STAGES):
        load_weight(weight, ring, stage, begin + stage, end, tile_units, LINES)
    pdl_wait(PDL)
    for stage in range(STAGES):
        load_x(x, ring, stage, begin + stage, end, tile_units, LINES)
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
            load_weight(weight, ring, stage, unit + STAGES, end, tile_units, LINES)
            load_x(x, ring, stage, unit + STAGES, end, tile_units, LINES)
            done += 1
        finish(sums, scales, bias, out, partials, counters, tile, sizes, BY_BLOCKS, 0, 1)


@gluon.jit
def _scales_at(unit, end, scales, sizes, ROWS: gl.constexpr, LINES: gl.constexpr, SUMS: gl.constexpr):
    """The scales of each line of a unit: those of x, and that of the weight. Beyond the end, those of the last unit."""
    weight_scale, ws_row, ws_column, x_scale, xs_row, xs_column = scales
    num_tokens, _, num_blocks, tile_units, _ = sizes
    TOKENS: gl.constexpr = SUMS.instr_shape[1]
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, SUMS))
    unit = gl.minimum(unit, end - 1)
    found = ()
    for line in gl.static_range(LINES):
        block = gl.minimum(unit % tile_units * LINES + line, num_blocks - 1)
        found += (gl.load(x_scale + token * xs_row + block * xs_column, token < num_tokens, 0.0),)
        found += (gl.load(weight_scale + unit // tile_units * ROWS // BLOCK * ws_row + block * ws_column),)
    return found


def can(call: Operands) -> bool:
    """Whether a Hopper GPU multiplies these by its own kernel for few tokens."""
    tokens = num_rows(call.x)
    if not 0 < tokens <= MOST_TOKENS:
        return False
    if call.weight_scale is not None:
        return scaled_calls_sm90.can(call)
    in_16_bits = call.x.element_size() == 2 and available(call.x.device)
    return in_16_bits and is_aligned(call.weight) and is_aligned(_rows(call.x))


def suits(call: Operands) -> bool:
    """Whether this kernel is the fastest for what it can multiply."""
    values = _launch.parameters("tokens_linear_decode_sm90", call.x.device, 0)
    return num_rows(call.x) <= values["most_tokens" if call.weight_scale is None else "most_scaled_tokens"]


def decode_linear(call: Operands, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of the contract, for arguments that were checked."""
    x, weight, weight_scale, x_scale, out_dtype = call
    of_blocks, rows, (num_outputs, columns) = weight_scale is not None and by_blocks(call), _rows(x), weight.shape
    num_tokens = rows.shape[0]  # len(rows) takes PyTorch several times as long
    scheme = "" if weight_scale is None else "blocks_" if of_blocks else "rows_"
    values = _launch.parameters(f"{scheme}linear_decode_sm90", x.device, num_tokens)
    width, tokens = LINE.value // x.element_size(), max(_launch.next_power_of_2(num_tokens), FEWEST_TOKENS)
    tiles, tile_units = _launch.cdiv(num_outputs, values["rows"]), _launch.cdiv(columns, width * values["lines"])
    run = run_of(
        tiles, tile_units, values["programs"] * _launch.multiprocessors(x.device),
        values["piece_bytes"] / (values["rows"] * values["lines"] * LINE.value),
    )  # fmt: skip
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
        BY_BLOCKS=of_blocks, LINES=values["lines"], STAGES=values["stages"],
        num_warps=warps, **limit, **_launch.launch_options(x.device),
    )  # fmt: skip
    return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])
