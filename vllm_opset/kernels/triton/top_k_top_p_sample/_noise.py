"""The exponential noise of top_k_top_p_sample: random words of the Philox generator, and exponential numbers of them.

An argmax needs the noise of every token that may be kept, so this is most of the arithmetic of a row.
"""

import triton
import triton.language as tl

from vllm_opset.ops.sampling import philox

ROUNDS, WORDS = tl.constexpr(philox.ROUNDS), tl.constexpr(philox.WORDS)
FIRST_MULTIPLIER, SECOND_MULTIPLIER = (tl.constexpr(multiplier) for multiplier in philox.MULTIPLIERS)
FIRST_KEY_STEP, SECOND_KEY_STEP = (tl.constexpr(step) for step in philox.KEY_STEPS)
LARGEST_UNIFORM = tl.constexpr(philox.LARGEST_UNIFORM)
LN2 = tl.constexpr(0.6931471805599453)
ONE_BITS = tl.constexpr(0x3F800000)  # the bits of 1.0
TWO_THIRDS_BITS = tl.constexpr(0x3F2AAAAB)  # the bits of 2/3
EXPONENT_BITS = tl.constexpr(-0x800000)  # sign and exponent


@triton.jit
def random_words(seed, block):
    """The four words of blocks of the stream `seed`: those of tl.randint4x.

    A 64-bit product is one instruction on a GPU. tl.randint4x takes the halves of each product one by one, and the
    instruction for the upper half is slow.
    """
    first_key, second_key = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0 = block.to(tl.uint32)
    c1, c2, c3 = tl.zeros_like(c0), tl.zeros_like(c0), tl.zeros_like(c0)
    for _ in tl.static_range(ROUNDS):
        a, b = c0.to(tl.uint64) * FIRST_MULTIPLIER, c2.to(tl.uint64) * SECOND_MULTIPLIER
        c0, c1 = (b >> 32).to(tl.uint32) ^ c1 ^ first_key, b.to(tl.uint32)
        c2, c3 = (a >> 32).to(tl.uint32) ^ c3 ^ second_key, a.to(tl.uint32)
        first_key = tl.add(first_key, FIRST_KEY_STEP, sanitize_overflow=False)
        second_key = tl.add(second_key, SECOND_KEY_STEP, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def noise_of_block(seed, blocks):
    """The noise of the four tokens of each block, in the order of the blocks."""
    words = random_words(seed, blocks)
    words = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3])).reshape(blocks.shape[0] * WORDS)
    return exponential(words)


@triton.jit
def noise_of(seed, token):
    """The noise of tokens in any order."""
    words = random_words(seed, token // WORDS)
    lane = token % WORDS
    return exponential(
        tl.where(lane < 2, tl.where(lane == 0, words[0], words[1]), tl.where(lane == 2, words[2], words[3]))
    )


@triton.jit
def exponential(words):
    """`philox.exponential` of random words, with a relative error below 3e-7.

    The logarithm is that of 1 − u = 2ⁿ (1 + f), with 1 + f from 2/3 to 4/3. If n is 0, f is −u exactly, which is
    precise for small u. The polynomial is the best of its degree for log(1 + f).
    """
    uniform = tl.minimum(words.to(tl.uint32, bitcast=True).to(tl.float32) * 2.0**-32 + 2.0**-33, LARGEST_UNIFORM)
    exponent = ((1.0 - uniform).to(tl.int32, bitcast=True) - TWO_THIRDS_BITS) & EXPONENT_BITS
    scale = (-exponent + ONE_BITS).to(tl.float32, bitcast=True)
    f = tl.fma(-uniform, scale, scale - 1.0)
    series = f * 0.14026351273059845 - 0.15388540923595428
    series = series * f + 0.13995808362960815
    series = series * f - 0.1641596108675003
    series = series * f + 0.20011168718338013
    series = series * f - 0.2500782012939453
    series = series * f + 0.33333197236061096
    series = series * f - 0.49999937415122986
    return -((series * (f * f) + f) + exponent.to(tl.float32) * (LN2 * 2.0**-23))
