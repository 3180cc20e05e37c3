"""Philox4x32-10, the counter-based random numbers of the sampling ops: any word of any stream, in any order.

Semantics: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11). A 64-bit key names a stream, and a
counter names a block of four 32-bit words in it. `block(offset, 0, 0, 0, seed & MASK, seed >> 32 & MASK)` equals
Triton's `tl.randint4x(seed, offset)` for 32-bit offsets.
"""

from typing import TypeVar

import torch

MASK = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
WORDS = 4  # words of a block
# The largest fp32 below one. Rounding must not turn a uniform number into 1, because its exponential would be infinite.
LARGEST_UNIFORM = 1 - 2**-24

Words = TypeVar("Words")


def block(c0: Words, c1: Words, c2: Words, c3: Words, k0: Words, k1: Words) -> tuple[Words, Words, Words, Words]:
    """The four words of the block at a counter (c0 … c3) in the stream of a key (k0, k1), all 32-bit values.

    The arguments are Python integers, int64 tensors, or int64 or uint64 NumPy arrays; tensors and arrays broadcast.
    Products of 64-bit elements wrap around, which keeps all the bits that are used.
    """
    for _ in range(ROUNDS):
        a, b = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (b >> 32 & MASK) ^ c1 ^ k0, b & MASK, (a >> 32 & MASK) ^ c3 ^ k1, a & MASK
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def words(keys: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` words of each key's stream: int64 [B, count] of 32-bit values, from int64 keys [B].

    Word i is lane i % 4 of the block at counter i // 4.
    """
    counters = torch.arange(-(-count // WORDS), device=keys.device)
    zero = torch.zeros_like(counters)
    low, high = (keys & MASK).unsqueeze(1), (keys >> 32 & MASK).unsqueeze(1)
    return torch.stack(block(counters, zero, zero, zero, low, high), dim=-1).flatten(1)[:, :count]


def exponential(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Exponential random numbers from random 32-bit words: −log(1 − u) with u = min((word + ½) / 2³², 1 − 2⁻²⁴).

    All are positive and finite. Small numbers are precise, which matters because the draw favours them. The
    smallest is 1.2e-10.
    """
    uniform = ((words.to(dtype) + 0.5) * 2**-32).clamp_(max=LARGEST_UNIFORM)
    return uniform.neg_().log1p_().neg_()
