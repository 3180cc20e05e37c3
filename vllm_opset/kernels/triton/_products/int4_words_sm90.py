"""int4 weights on Hopper GPUs, dequantised in registers for wgmma.

`dequantised` takes ROWS outputs and CHUNK columns at a time, and `dequantised_words` a unit of `words_sm90`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vllm_opset.kernels.triton._products.int4 import HALF, MAGIC_BF16, MAGIC_FP16
from vllm_opset.kernels.triton._products.words_sm90 import factor_of

CHUNK = gl.constexpr(64)  # columns of 16 bits: a line of x in shared memory
ROWS = gl.constexpr(64)  # of a product: the instruction's

# A thread has those pairs of bytes whose values it multiplies.
BYTES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [ROWS.value, CHUNK.value // 4],
    )
)  # fmt: skip

# The same by groups of 32 columns, of which a CHUNK has two: [ROWS, groups, pairs of bytes of one].
HALVES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0, 0], [0, 0, 4], [0, 1, 0]], [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [ROWS.value, 2, CHUNK.value // 8],
    )
)  # fmt: skip

# Makes two bytes a pair of low values and one of high ones, less their zero points and times their scales. It is as
# `PAIRS` of `int4`, and its product is rounded once.
SCALED = """{{
.reg .b32 low, high, one;
mov.b32 one, {one};
prmt.b32 low, $4, 0, 0x4140;
shr.u32 high, low, 4;
lop3.b32 low, low, 0x000F000F, {magic}, 0xEA;
lop3.b32 high, high, 0x000F000F, {magic}, 0xEA;
fma.rn.{type} low, low, one, $5;
fma.rn.{type} high, high, one, $5;
mul.rn.{type} low, low, $6;
mul.rn.{type} high, high, $6;
mov.b32 {{$0, $1}}, low;
mov.b32 {{$2, $3}}, high;
}}"""
REGISTERS = gl.constexpr("=h,=h,=h,=h,r,r,r")
SCALED_BF16 = gl.constexpr(SCALED.format(magic="0x43004300", one="0x3F803F80", type="bf16x2"))
SCALED_FP16 = gl.constexpr(SCALED.format(magic="0x64006400", one="0x3C003C00", type="f16x2"))

# The same for the eight values of a word, which become four pairs.
OF_WORD = """{{
.reg .b32 pair, one;
mov.b32 one, {one};
lop3.b32 pair, $8, 0x000F000F, {magic}, 0xEA;
fma.rn.{type} pair, pair, one, $9; mul.rn.{type} pair, pair, $10; mov.b32 {{$0, $1}}, pair;
shr.u32 pair, $8, 4; lop3.b32 pair, pair, 0x000F000F, {magic}, 0xEA;
fma.rn.{type} pair, pair, one, $9; mul.rn.{type} pair, pair, $10; mov.b32 {{$2, $3}}, pair;
shr.u32 pair, $8, 8; lop3.b32 pair, pair, 0x000F000F, {magic}, 0xEA;
fma.rn.{type} pair, pair, one, $9; mul.rn.{type} pair, pair, $10; mov.b32 {{$4, $5}}, pair;
shr.u32 pair, $8, 12; lop3.b32 pair, pair, 0x000F000F, {magic}, 0xEA;
fma.rn.{type} pair, pair, one, $9; mul.rn.{type} pair, pair, $10; mov.b32 {{$6, $7}}, pair;
}}"""
WORD_REGISTERS = gl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r,r")
WORD_BF16 = gl.constexpr(OF_WORD.format(magic="0x43004300", one="0x3F803F80", type="bf16x2"))
WORD_FP16 = gl.constexpr(OF_WORD.format(magic="0x64006400", one="0x3C003C00", type="f16x2"))


@gluon.jit
def _both_halves(value):
    """32 bits of which each half has the value, in 16 bits."""
    return value.to(gl.uint16, bitcast=True).to(gl.uint32) * 0x10001


@gluon.jit
def _addend(zero, dtype: gl.constexpr):
    """What subtracts MAGIC and the zero point from a value."""
    MAGIC: gl.constexpr = MAGIC_BF16 if dtype == gl.bfloat16 else MAGIC_FP16
    return (-MAGIC - zero).to(dtype)


@gluon.constexpr_function
def groups_of_chunk(scaled_columns):
    """The number of groups in a CHUNK, one or two, if so many columns share a scale."""
    return 2 if scaled_columns == CHUNK.value // 2 else 1


@gluon.jit
def group_offsets(row, row_stride, column_stride, GROUPS: gl.constexpr):
    """The offsets of the scales of a CHUNK [ROWS, GROUPS] from the scale of row 0 and the CHUNK's first group.

    row: the numbers of its rows, in the layout of `rows_of_chunk`.
    """
    if GROUPS == 1:
        return (row * row_stride)[:, None]
    else:
        group = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))
        return (row * row_stride)[:, None] + (group * column_stride)[None, :]


@gluon.jit
def rows_of_chunk(GROUPS: gl.constexpr):
    """The numbers of rows in the threads that have their scales."""
    BY_GROUP: gl.constexpr = BYTES if GROUPS == 1 else gl.SliceLayout(2, HALVES)
    return gl.arange(0, ROWS, gl.SliceLayout(1, BY_GROUP))


@gluon.jit
def _for_bytes(by_group):
    """Values by rows and groups in a shape that broadcasts over pairs of bytes [ROWS, CHUNK / 4]."""
    if by_group.shape[1] == 1:
        return by_group
    else:
        each, _ = gl.broadcast(by_group[:, :, None], gl.zeros([ROWS, 2, CHUNK // 8], by_group.dtype, HALVES))
        return gl.convert_layout(each.reshape([ROWS, CHUNK // 4]), BYTES, True)


@gluon.jit
def dequantised(w, zero, scale, FACTOR: gl.constexpr):
    """The values of pairs of bytes [ROWS, CHUNK / 4], less their zero points and times their scales, rounded once.

    zero, scale: [ROWS, groups], of each row's groups.
    """
    dtype: gl.constexpr = scale.dtype
    SCALED: gl.constexpr = SCALED_BF16 if dtype == gl.bfloat16 else SCALED_FP16
    w = w.to(gl.uint16, bitcast=True).to(gl.uint32)
    zeros, scales = _for_bytes(_both_halves(_addend(zero, dtype))), _for_bytes(_both_halves(scale))
    low, low_next, high, high_next = gl.inline_asm_elementwise(
        SCALED, REGISTERS, [w, zeros, scales], (scale.dtype,) * 4, True, 1
    )
    both = gl.join(gl.join(low, low_next), gl.join(high, high_next))
    both = both.reshape([ROWS, CHUNK // (2 * HALF), HALF // 2, 2, 2]).permute([0, 1, 4, 2, 3])
    return gl.convert_layout(both.reshape([ROWS, CHUNK]), FACTOR, True)


@gluon.jit
def dequantised_words(words, zero, scale, FACTOR: gl.constexpr):
    """A unit's values, less their zero points and times their scales, rounded once. zero, scale: by rows and groups."""
    dtype: gl.constexpr = scale.dtype
    WORD: gl.constexpr = WORD_BF16 if dtype == gl.bfloat16 else WORD_FP16
    zeros, scales = _both_halves(_addend(zero, dtype))[:, :, None], _both_halves(scale)[:, :, None]
    pairs = gl.inline_asm_elementwise(WORD, WORD_REGISTERS, [words, zeros, scales], (scale.dtype,) * 8, True, 1)
    return factor_of(pairs, FACTOR)
