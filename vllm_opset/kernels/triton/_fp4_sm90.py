"""MXFP4 weights on Hopper GPUs, widened in registers for wgmma: WIDTH columns of each row at a time.

A product is a sum over columns, whose order does not matter. Four threads share a row of wgmma's factor. Thread t
widens the t-th 32 columns of the row, which are 16 bytes and share a scale. x is stored in the same order of columns.

A value is s eem in bits, and bf16 is s eeeeeeee mmmmmmm. With its three bits at the lower end of the exponent, it is
2**-126 of what it stands for, also where ee is 0. One product with a power of two makes that good, and applies 2**-64
of the scale. The sums are multiplied by 2**64. bf16 holds that power of two for scales up to LARGEST_SCALE. Weights by
scales below 2**-62 are smaller than 2**-60. They lose bits, which are less than 2**-62.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WIDTH = gl.constexpr(128)  # columns of a unit
WORDS = gl.constexpr(WIDTH.value // 8)  # of 32 bits, which hold a row's weights of a unit
SUMS_FACTOR = gl.constexpr(2.0**64)
LARGEST_SCALE = 191  # the byte of 2**64
# A scale's byte s is that of 2**(s - 127). Two bf16 of 2**(s - 127 + 126 - 64) have s and this as their exponents. The
# largest one is infinity, which makes NaN of zeros: for the byte that stands for NaN, and for scales above 2**64.
MORE, LARGEST, PAIR = gl.constexpr(126 - 64), gl.constexpr(255), gl.constexpr(0x00800080)

# Makes eight values four pairs: the values i and i + 4 of a word, for each i. A product of integers makes two copies
# of a value: one has the sign in its place, and the other one the rest.
WIDEN = """{
.reg .b32 high, pair;
shr.u32 high, $8, 8;
and.b32 pair, $8, 0x000F000F; mul.lo.u32 pair, pair, 0x1040; and.b32 pair, pair, 0x81C081C0;
mul.rn.bf16x2 pair, pair, $9; mov.b32 {$0, $1}, pair;
and.b32 pair, $8, 0x00F000F0; mul.lo.u32 pair, pair, 0x0104; and.b32 pair, pair, 0x81C081C0;
mul.rn.bf16x2 pair, pair, $9; mov.b32 {$2, $3}, pair;
and.b32 pair, high, 0x000F000F; mul.lo.u32 pair, pair, 0x1040; and.b32 pair, pair, 0x81C081C0;
mul.rn.bf16x2 pair, pair, $9; mov.b32 {$4, $5}, pair;
and.b32 pair, high, 0x00F000F0; mul.lo.u32 pair, pair, 0x0104; and.b32 pair, pair, 0x81C081C0;
mul.rn.bf16x2 pair, pair, $9; mov.b32 {$6, $7}, pair;
}"""
WIDEN = gl.constexpr(WIDEN)
WIDEN_REGISTERS = gl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r")


@gluon.constexpr_function
def words_layout(rows, warps):
    """The words of a unit [rows, WORDS] in those threads that multiply them."""
    registers, of_warps, row = [[0, 1], [0, 2], [8, 0]], [], 16
    while row < 16 * warps:
        of_warps.append([row, 0])
        row *= 2
    while row < rows:
        registers.append([row, 0])
        row *= 2
    return gl.DistributedLinearLayout(
        registers, [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], of_warps, [], [rows, WORDS.value]
    )


@gluon.constexpr_function
def groups_layout(rows, warps):
    """The words by the groups that share a scale: [rows, groups, words of one]."""
    layout = words_layout(rows, warps)

    def split(bases):
        return [[row, word // 4, word % 4] for row, word in bases]

    return gl.DistributedLinearLayout(
        split(layout.reg_bases), split(layout.lane_bases), split(layout.warp_bases), [], [rows, WORDS.value // 4, 4]
    )


@gluon.jit
def scale_pairs(ROWS: gl.constexpr):
    """The rows and the groups of a unit's scales, in the threads that widen their weights."""
    OF_GROUP: gl.constexpr = gl.SliceLayout(2, groups_layout(ROWS, gl.num_warps()))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, OF_GROUP))
    return row, gl.arange(0, WORDS // 4, gl.SliceLayout(0, OF_GROUP))


@gluon.jit
def words_of(unit):
    """The words of a unit in shared memory, by row and group."""
    ROWS: gl.constexpr = unit.shape[0]
    LAYOUT: gl.constexpr = words_layout(ROWS, gl.num_warps())
    GROUPS: gl.constexpr = groups_layout(ROWS, gl.num_warps())
    return gl.convert_layout(unit.load(LAYOUT).reshape([ROWS, WORDS // 4, 4]), GROUPS, True)


@gluon.jit
def widened(words, scale, FACTOR: gl.constexpr):
    """2**-64 of a unit's weights, in the order of columns of `reordered`. scale: bytes by rows and groups."""
    ROWS: gl.constexpr = words.shape[0]
    pair = gl.minimum(scale.to(gl.int32) + MORE, LARGEST) * PAIR
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        WIDEN, WIDEN_REGISTERS, [words, pair[:, :, None]],
        (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        True, 1,
    )  # fmt: skip
    first = gl.join(gl.join(a, e), gl.join(c, g))
    second = gl.join(gl.join(b, f), gl.join(d, h))
    y = gl.join(first, second)  # by row, group, word, then i // 2, i % 2, and the one of the pair
    y = y.permute([0, 2, 3, 4, 1, 5]).reshape([ROWS, WIDTH])
    return gl.convert_layout(y, FACTOR, True)


@gluon.jit
def reordered(x):
    """Columns [rows, WIDTH] of x in the order in which threads have those of the weight."""
    x = x.reshape([x.shape[0], 4, 4, 2, 2, 2])  # by group, word, the one of the pair, i // 2, i % 2
    return x.permute([0, 2, 4, 5, 1, 3]).reshape([x.shape[0], WIDTH])
