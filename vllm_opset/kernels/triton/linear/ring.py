"""linear with int4 weights for few tokens, on NVIDIA GPUs from Ampere on: tiles pass a ring in shared memory.

Asynchronous copies bring the next tiles of the weight and of x while tensor cores multiply. A thread has those bytes of
the weight in registers whose values it multiplies, so none moves to another thread once it is dequantised. Few outputs
do not fill a GPU. Then several programs share a row of the weight, and the last of them adds their sums, always in the
same order.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from vllm_opset.kernels.triton import INTERPRETED, _launch
from vllm_opset.kernels.triton._gluon import barrier, cp_async
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._products.counters import zeros
from vllm_opset.kernels.triton._products.int4 import (
    HALF,
    MAGIC_BF16,
    MAGIC_FP16,
    NO_ZERO_POINT,
    PAIRS_BF16,
    PAIRS_FP16,
    REGISTERS,
    scale_columns,
)
from vllm_opset.kernels.triton.linear.packed import splits_of
from vllm_opset.ops.schemes import values_shape

# The columns of a tile, and the bytes of a row of the weight in it. Each of four threads has sixteen of these.
TILE, BYTES = gl.constexpr(128), gl.constexpr(64)
COPY_BYTES = 16  # of an asynchronous copy: they divide its address
# Triton compiles anew for strides that this divides, and then knows that rows are aligned.
SPECIALISED = 16
FEWEST_TOKENS = 8  # that tensor cores take as the columns of a product


def fits(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> bool:
    """Whether the variant `ring` can multiply: whole tiles of one scale, in 16 bits, at aligned addresses."""
    columns, on_nvidia = x.shape[-1], not INTERPRETED and _launch.target(x.device).vendor == "nvidia"
    aligned = x.stride(-1) == 1 and x.data_ptr() % COPY_BYTES == 0 and weight.data_ptr() % COPY_BYTES == 0
    rows_aligned = all(stride % SPECIALISED == 0 for stride in x.stride()[:-1])
    whole = columns % TILE.value == 0 and scale_columns(weight, weight_scale) % TILE.value == 0
    return on_nvidia and x.element_size() == 2 and aligned and rows_aligned and whole


def ring_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None,
) -> torch.Tensor:
    """The product of the contract by the variant `ring`, for arguments that were checked."""
    (outputs, columns), rows = values_shape(weight), x.reshape(-1, x.shape[-1])
    values = _launch.parameters("linear_ring", x.device, len(rows))
    tokens = min(max(_launch.next_power_of_2(len(rows)), FEWEST_TOKENS), values["tokens"])
    grid = _launch.cdiv(outputs, values["outputs"]), _launch.cdiv(len(rows), tokens)
    split_tiles, splits = splits_of(columns // TILE.value, values["programs"] // max(grid[0] * grid[1], 1))
    out, partials, counters = x.new_empty((*x.shape[:-1], outputs)), None, None
    if splits > 1:
        partials = x.new_empty((splits, len(rows), outputs), dtype=torch.float32)
        counters = zeros(x.device, grid[0] * grid[1])
    _launch.launch(
        _multiply_ring, (*grid, splits),
        rows, weight, weight_scale, weight_zero_point, bias, out, partials, counters, len(rows), outputs, columns,
        split_tiles, rows.stride(0), weight.stride(0), *weight_scale.stride(),
        GROUP=scale_columns(weight, weight_scale), BLOCK_T=tokens, BLOCK_N=values["outputs"], STAGES=values["stages"],
        num_warps=values["warps"], **_launch.launch_options(x.device),
    )  # fmt: skip
    return out


@gluon.constexpr_function
def _sixteen_of_rows(rows, warps, own):
    """A layout of [rows, BYTES]: four threads have sixteen neighbouring columns of a row each.

    rows: as those of the factors of a product. own: whether each warp has rows of its own.
    """

    def powers(first, last):
        return [[1 << bit, 0] for bit in range(first.bit_length() - 1, last.bit_length() - 1)]

    columns, lanes = [[0, 1], [0, 2], [0, 4], [0, 8]], [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    if own:
        registers, of_warps = [[8, 0], *powers(16 * warps, rows)], powers(16, 16 * warps)
    else:
        registers, of_warps = powers(8, rows), [[0, 0]] * (warps.bit_length() - 1)
    return gl.DistributedLinearLayout([*columns, *registers], lanes, of_warps, [], [rows, 64])


@gluon.jit
def _pairs(w, zero, dtype: gl.constexpr):
    """The low and the high values of bytes, less their zero points, in bf16 or fp16."""
    if dtype == gl.bfloat16:
        zero = (-MAGIC_BF16 - zero).to(gl.bfloat16)
        return gl.inline_asm_elementwise(PAIRS_BF16, REGISTERS, [w, zero], (gl.bfloat16, gl.bfloat16), True, 4)
    else:
        zero = (-MAGIC_FP16 - zero).to(gl.float16)
        return gl.inline_asm_elementwise(PAIRS_FP16, REGISTERS, [w, zero], (gl.float16, gl.float16), True, 4)


@gluon.jit
def _add_product(w, x, sums):
    """sums + w xᵀ of what `_sixteen_of_rows` lays out. Each instruction takes four of a thread's sixteen columns."""
    w = w.reshape([w.shape[0], 4, 4, 2, 2]).permute([0, 2, 3, 1, 4]).reshape([w.shape[0], BYTES])
    x = x.reshape([x.shape[0], 4, 4, 2, 2]).permute([0, 2, 3, 1, 4]).reshape([x.shape[0], BYTES]).permute([1, 0])
    w = gl.convert_layout(w, gl.DotOperandLayout(0, sums.type.layout, 2), True)
    return mma_v2(w, gl.convert_layout(x, gl.DotOperandLayout(1, sums.type.layout, 2), True), sums)


@gluon.jit
def _copy(w_ring, x_ring, weight, x, copied, tile, place):
    """Begins to copy a tile into a place of the ring. Rows without a token become zero, and are not read.

    copied: the offsets of the weight and of x, and which rows of x have a token.
    """
    w_copied, x_copied, is_token = copied
    cp_async(w_ring.index(place), weight + tile * BYTES + w_copied)
    cp_async(x_ring.index(place), x + tile * TILE + x_copied, is_token)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["num_tokens", "num_outputs", "split_tiles"])
def _multiply_ring(
    x, weight, scale, zero_point, bias, out, partials, counters, num_tokens, num_outputs, columns, split_tiles,
    x_stride, weight_stride, scale_stride, scale_column_stride,
    GROUP: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """partials, counters: None for one split. Counters are zero, and zero again afterwards."""
    pdl_wait(PDL)
    dtype: gl.constexpr = x.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    W: gl.constexpr = _sixteen_of_rows(BLOCK_N, WARPS, True)
    X: gl.constexpr = _sixteen_of_rows(BLOCK_T, WARPS, False)
    COPY_W: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [WARPS, 1], [1, 0])
    COPY_X: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    w_ring = gl.allocate_shared_memory(
        gl.uint8, [STAGES, BLOCK_N, BYTES], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    )
    # Eight threads read 16 bytes each of two rows. Without exchanging the halves of 32 bytes in every second row, these
    # would be in half of the banks.
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_T, TILE], gl.SwizzledSharedLayout(8, 1, 2, order=[1, 0]))
    first_output, first_token = gl.program_id(0) * BLOCK_N, gl.program_id(1) * BLOCK_T
    begin = gl.program_id(2) * split_tiles
    end = min(begin + split_tiles, columns // TILE)

    # Rows beyond the last output are read as if they were the last. Offsets from a tile's first row fit 32 bits.
    last_output = num_outputs - 1 - first_output
    weight += first_output.to(gl.int64) * weight_stride
    w_row = gl.minimum(gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY_W)), last_output)
    w_copied = w_row[:, None] * weight_stride + gl.arange(0, BYTES, gl.SliceLayout(0, COPY_W))[None, :]
    x += first_token.to(gl.int64) * x_stride
    x_row = gl.arange(0, BLOCK_T, gl.SliceLayout(1, COPY_X))
    place = gl.arange(0, TILE, gl.SliceLayout(0, COPY_X))
    # The columns of the low four bits of all bytes come first, then those of the high ones.
    column = place % BYTES // HALF * (2 * HALF) + place // BYTES * HALF + place % HALF
    x_copied = x_row[:, None] * x_stride + gl.max_contiguous(gl.multiple_of(column, HALF), HALF)[None, :]
    copied = w_copied, x_copied, (first_token + x_row < num_tokens)[:, None]
    output = gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUMS))
    scale += first_output.to(gl.int64) * scale_stride
    scales = scale + gl.minimum(output, last_output) * scale_stride

    for stage in gl.static_range(STAGES - 1):
        _copy(w_ring, x_ring, weight, x, copied, min(begin + stage, end - 1), stage)
    sums = gl.zeros([BLOCK_N, BLOCK_T], gl.float32, SUMS)
    of_group = begin * TILE // GROUP * scale_column_stride
    next_scale = gl.load(scales + of_group)
    if zero_point is not None:
        zero_point += first_output.to(gl.int64) * scale_stride
        w_output = gl.minimum(gl.arange(0, BLOCK_N, gl.SliceLayout(1, W)), last_output)
        zeros = zero_point + w_output * scale_stride
        next_zero = gl.load(zeros + of_group)
    for tile in range(begin, end):
        async_copy.wait_group(STAGES - 2)
        barrier()
        following, slot = min(tile + STAGES - 1, end - 1), (tile - begin) % STAGES
        _copy(w_ring, x_ring, weight, x, copied, following, (slot + STAGES - 1) % STAGES)
        # The next tile's scales are on their way while this one is multiplied.
        of_tile = next_scale.to(gl.float32)[:, None]
        of_group = min(tile + 1, end - 1) * TILE // GROUP * scale_column_stride
        next_scale = gl.load(scales + of_group)
        w, both = w_ring.index(slot).load(W), x_ring.index(slot)
        zero = gl.full([BLOCK_N, BYTES], NO_ZERO_POINT, gl.float32, W)
        if zero_point is not None:
            zero, _ = gl.broadcast(next_zero.to(gl.float32)[:, None], w)
            next_zero = gl.load(zeros + of_group)
        low, high = _pairs(w, zero, dtype)
        product = gl.zeros([BLOCK_N, BLOCK_T], gl.float32, SUMS)
        product = _add_product(low, both.slice(0, BYTES, 1).load(X), product)
        product = _add_product(high, both.slice(BYTES, BYTES, 1).load(X), product)
        sums += product * of_tile
    async_copy.wait_group(0)

    token = first_token + gl.arange(0, BLOCK_T, gl.SliceLayout(0, SUMS))
    is_result = (output <= last_output)[:, None] & (token < num_tokens)[None, :]
    result = token.to(gl.int64)[None, :] * num_outputs + (first_output + output)[:, None]
    is_last = True
    if partials is not None:
        of_split = num_tokens.to(gl.int64) * num_outputs
        gl.store(partials + gl.program_id(2) * of_split + result, sums, is_result)
        barrier()  # all threads' stores come before the count
        counter = counters + gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
        is_last = gl.atomic_add(counter, 1, sem="acq_rel") == gl.num_programs(2) - 1
        if is_last:
            sums = gl.zeros([BLOCK_N, BLOCK_T], gl.float32, SUMS)
            for split in range(gl.num_programs(2)):
                sums += gl.load(partials + split * of_split + result, is_result, 0.0, cache_modifier=".cg")
            gl.store(counter, 0)
    if is_last:
        if bias is not None:
            sums += gl.load(bias + first_output + gl.minimum(output, last_output)).to(gl.float32)[:, None]
        gl.store(out + result, sums.to(dtype), is_result)
