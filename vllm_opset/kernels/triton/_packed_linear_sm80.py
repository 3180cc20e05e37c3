"""linear with int4 weights on NVIDIA GPUs from Ampere on: packed tiles pass a ring in shared memory.

Asynchronous copies bring the next tiles of the weight and of x while tensor cores multiply. A thread's bytes of the
weight are those whose values it multiplies, so that none is exchanged once it is dequantised in registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from vllm_opset.kernels.triton._launch import pdl_wait

BYTES = gl.constexpr(64)  # of a row of the weight in a tile: sixteen neighbouring ones for each of four threads
TILE = gl.constexpr(128)  # the columns of a tile
HALF = gl.constexpr(16)  # the columns whose values share the halves of the same bytes
NO_ZERO_POINT = gl.constexpr(8)

PAIRS = """{{
.reg .b32 first, second, third, fourth, one, nothing;
mov.b32 one, {one};
mov.b32 nothing, 0x80008000;
prmt.b32 first, $4, 0, 0x4140;
prmt.b32 second, $4, 0, 0x4342;
shr.u32 third, first, 4;
shr.u32 fourth, second, 4;
lop3.b32 first, first, 0x000F000F, {magic}, 0xEA;
lop3.b32 second, second, 0x000F000F, {magic}, 0xEA;
lop3.b32 third, third, 0x000F000F, {magic}, 0xEA;
lop3.b32 fourth, fourth, 0x000F000F, {magic}, 0xEA;
fma.rn.{type} {first}, first, one, $5;
fma.rn.{type} {second}, second, one, $6;
fma.rn.{type} {third}, third, one, $5;
fma.rn.{type} {fourth}, fourth, one, $6;
{scale}
}}"""
SCALE = """fma.rn.{type} $0, first, $7, nothing;
fma.rn.{type} $1, second, $8, nothing;
fma.rn.{type} $2, third, $7, nothing;
fma.rn.{type} $3, fourth, $8, nothing;"""
OUT = {"first": "$0", "second": "$1", "third": "$2", "fourth": "$3"}
STAY = {name: name for name in OUT}
OF_BF16 = {"magic": "0x43004300", "one": "0x3F803F80", "type": "bf16x2"}
OF_FP16 = {"magic": "0x64006400", "one": "0x3C003C00", "type": "f16x2"}
REGISTERS = gl.constexpr("=&r,=&r,=&r,=&r,r,r,r")
SCALED_REGISTERS = gl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r")
PAIRS_BF16 = gl.constexpr(PAIRS.format(**OF_BF16, **OUT, scale=""))
PAIRS_FP16 = gl.constexpr(PAIRS.format(**OF_FP16, **OUT, scale=""))
SCALED_BF16 = gl.constexpr(PAIRS.format(**OF_BF16, **STAY, scale=SCALE.format(type="bf16x2")))
SCALED_FP16 = gl.constexpr(PAIRS.format(**OF_FP16, **STAY, scale=SCALE.format(type="f16x2")))
MAGIC_BF16, MAGIC_FP16 = gl.constexpr(128.0), gl.constexpr(1024.0)


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
def _pairs(w, zero, scale, dtype: gl.constexpr):
    """The low and the high values of bytes, less their zero points, times their scales if any, in bf16 or fp16."""
    if dtype == gl.bfloat16:
        zero = (-MAGIC_BF16 - zero).to(gl.bfloat16)
        if scale is None:
            return gl.inline_asm_elementwise(PAIRS_BF16, REGISTERS, [w, zero], (gl.bfloat16, gl.bfloat16), True, 4)
        else:
            return gl.inline_asm_elementwise(
                SCALED_BF16, SCALED_REGISTERS, [w, zero, scale.to(gl.bfloat16)], (gl.bfloat16, gl.bfloat16), True, 4
            )
    else:
        zero = (-MAGIC_FP16 - zero).to(gl.float16)
        if scale is None:
            return gl.inline_asm_elementwise(PAIRS_FP16, REGISTERS, [w, zero], (gl.float16, gl.float16), True, 4)
        else:
            return gl.inline_asm_elementwise(
                SCALED_FP16, SCALED_REGISTERS, [w, zero, scale.to(gl.float16)], (gl.float16, gl.float16), True, 4
            )


@gluon.jit
def _add_product(w, x, sums):
    """sums + w xᵀ of what `_sixteen_of_rows` lays out. Each instruction takes four of a thread's sixteen columns."""
    w = w.reshape([w.shape[0], 4, 4, 2, 2]).permute([0, 2, 3, 1, 4]).reshape([w.shape[0], BYTES])
    x = x.reshape([x.shape[0], 4, 4, 2, 2]).permute([0, 2, 3, 1, 4]).reshape([x.shape[0], BYTES]).permute([1, 0])
    w = gl.convert_layout(w, gl.DotOperandLayout(0, sums.type.layout, 2), True)
    return mma_v2(w, gl.convert_layout(x, gl.DotOperandLayout(1, sums.type.layout, 2), True), sums)


@gluon.jit
def _copy(w_ring, x_ring, w_copied, x_copied, tile, stage, TILES: gl.constexpr):
    """Begins to copy tiles into a place of the ring."""
    for part in gl.static_range(TILES):
        number, place = tile * TILES + part, stage * TILES + part
        async_copy.async_copy_global_to_shared(w_ring.index(place), w_copied + number * BYTES)
        async_copy.async_copy_global_to_shared(x_ring.index(place), x_copied + number * TILE)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["num_tokens", "num_outputs", "split_tiles"])
def multiply_packed(
    x, weight, scale, zero_point, bias, out, partials, counters, num_tokens, num_outputs, columns, split_tiles,
    x_stride, weight_stride, scale_stride, scale_column_stride,
    GROUP: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr,
    SCALED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    dtype: gl.constexpr = x.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    W: gl.constexpr = _sixteen_of_rows(BLOCK_N, WARPS, True)
    X: gl.constexpr = _sixteen_of_rows(BLOCK_T, WARPS, False)
    COPY_W: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [WARPS, 1], [1, 0])
    COPY_X: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, W if SCALED else SUMS)
    w_ring = gl.allocate_shared_memory(
        gl.uint8, [STAGES * TILES, BLOCK_N, BYTES], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    )
    x_ring = gl.allocate_shared_memory(
        dtype, [STAGES * TILES, BLOCK_T, TILE], gl.SwizzledSharedLayout(8, 1, 2, order=[1, 0])
    )
    first_output, first_token = gl.program_id(0) * BLOCK_N, gl.program_id(1) * BLOCK_T
    begin = gl.program_id(2) * split_tiles
    end = min(begin + split_tiles, columns // (TILE * TILES))

    w_row = gl.minimum(first_output + gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY_W)), num_outputs - 1).to(gl.int64)
    w_copied = weight + w_row[:, None] * weight_stride + gl.arange(0, BYTES, gl.SliceLayout(0, COPY_W))[None, :]
    x_row = gl.minimum(first_token + gl.arange(0, BLOCK_T, gl.SliceLayout(1, COPY_X)), num_tokens - 1).to(gl.int64)
    place = gl.arange(0, TILE, gl.SliceLayout(0, COPY_X))
    column = place % BYTES // HALF * (2 * HALF) + place // BYTES * HALF + place % HALF
    column = gl.max_contiguous(gl.multiple_of(column, HALF), HALF)
    x_copied = x + x_row[:, None] * x_stride + column[None, :]
    scales = gl.minimum(first_output + gl.arange(0, BLOCK_N, OF_ROWS), num_outputs - 1).to(gl.int64) * scale_stride
    w_output = gl.minimum(first_output + gl.arange(0, BLOCK_N, gl.SliceLayout(1, W)), num_outputs - 1)
    zeros = w_output.to(gl.int64) * scale_stride

    for stage in gl.static_range(STAGES - 1):
        _copy(w_ring, x_ring, w_copied, x_copied, min(begin + stage, end - 1), stage, TILES)
    sums = gl.zeros([BLOCK_N, BLOCK_T], gl.float32, SUMS)
    of_group = begin * TILES * TILE // GROUP * scale_column_stride
    next_scale = gl.load(scale + scales + of_group)
    if zero_point is not None:
        next_zero = gl.load(zero_point + zeros + of_group)
    for tile in range(begin, end):
        async_copy.wait_group(STAGES - 2)
        gl.barrier()
        _copy(
            w_ring, x_ring, w_copied, x_copied, min(tile + STAGES - 1, end - 1), (tile - begin + STAGES - 1) % STAGES,
            TILES,
        )  # fmt: skip
        slot = (tile - begin) % STAGES * TILES
        for part in gl.static_range(TILES):
            of_tile = next_scale[:, None]
            following = min(tile * TILES + part + 1, columns // TILE - 1)
            of_group = following * TILE // GROUP * scale_column_stride
            next_scale = gl.load(scale + scales + of_group)
            w = w_ring.index(slot + part).load(W)
            zero = gl.full([BLOCK_N, BYTES], NO_ZERO_POINT, gl.float32, W)
            if zero_point is not None:
                zero, _ = gl.broadcast(next_zero.to(gl.float32)[:, None], w)
                next_zero = gl.load(zero_point + zeros + of_group)
            both = x_ring.index(slot + part)
            if SCALED:
                own, _ = gl.broadcast(of_tile, w)
                low, high = _pairs(w, zero, own, dtype)
                sums = _add_product(low, both.slice(0, BYTES, 1).load(X), sums)
                sums = _add_product(high, both.slice(BYTES, BYTES, 1).load(X), sums)
            else:
                low, high = _pairs(w, zero, None, dtype)
                product = gl.zeros([BLOCK_N, BLOCK_T], gl.float32, SUMS)
                product = _add_product(low, both.slice(0, BYTES, 1).load(X), product)
                product = _add_product(high, both.slice(BYTES, BYTES, 1).load(X), product)
                sums += product * of_tile.to(gl.float32)
    async_copy.wait_group(0)
    output = first_output + gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUMS))
    token = first_token + gl.arange(0, BLOCK_T, gl.SliceLayout(0, SUMS))
    is_result = (output < num_outputs)[:, None] & (token < num_tokens)[None, :]
    place_of = token.to(gl.int64)[None, :] * num_outputs + output[:, None]
    splits = gl.num_programs(2)
    is_last = True
    if splits > 1:
        of_split = num_tokens.to(gl.int64) * num_outputs
        gl.store(partials + gl.program_id(2) * of_split + place_of, sums, is_result)
        gl.barrier()
        counter = counters + gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
        is_last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1
        if is_last:
            sums = gl.zeros([BLOCK_N, BLOCK_T], gl.float32, SUMS)
            for split in range(splits):
                sums += gl.load(partials + split * of_split + place_of, is_result, 0.0, cache_modifier=".cg")
            gl.store(counter, 0)
    if is_last:
        if bias is not None:
            sums += gl.load(bias + gl.minimum(output, num_outputs - 1)).to(gl.float32)[:, None]
        gl.store(out + place_of, sums.to(dtype), is_result)
