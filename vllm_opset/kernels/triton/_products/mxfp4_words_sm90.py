"""MXFP4 weights on Hopper GPUs, widened in registers for wgmma: units of `words_sm90`.

A value is s eem in bits, and bf16 is s eeeeeeee mmmmmmm. With its three bits at the lower end of the exponent, it is
2**-126 of what it stands for, also where ee is 0. One product with a power of two makes that good, and applies 2**-64
of the scale. The sums are multiplied by 2**64. bf16 holds that power of two for scales up to LARGEST_SCALE. Weights by
scales below 2**-62 are smaller than 2**-60. They lose bits, which are less than 2**-62.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vllm_opset.kernels.triton._products.words_sm90 import factor_of

SUMS_FACTOR = gl.constexpr(2.0**64)
LARGEST_SCALE = 191  # the byte of 2**64
# A scale's byte s is that of 2**(s - 127). Two bf16 of 2**(s - 127 + 126 - 64) have s and this as their exponents. The
# largest one is infinity, which makes NaN of zeros: for the byte that stands for NaN, and for scales above 2**64.
MORE, LARGEST, PAIR = gl.constexpr(126 - 64), gl.constexpr(255), gl.constexpr(0x00800080)

# Makes the eight values of a word four pairs. A product of integers makes two copies of a value: one has the sign in
# its place, and the other one the rest.
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


@gluon.jit
def widened(words, scale, FACTOR: gl.constexpr):
    """2**-64 of a unit's weights. scale: bytes by rows and groups."""
    pair = gl.minimum(scale.to(gl.int32) + MORE, LARGEST) * PAIR
    pairs = gl.inline_asm_elementwise(
        WIDEN, WIDEN_REGISTERS, [words, pair[:, :, None]],
        (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        True, 1,
    )  # fmt: skip
    return factor_of(pairs, FACTOR)
