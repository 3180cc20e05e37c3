"""Slots and formats of the paged KV cache [num_blocks, num_kv_heads, block_size, 2 * head_size], any strides."""

import triton
import triton.language as tl

FP8_MAX = tl.constexpr(448.0)  # the largest value of e4m3


@triton.jit
def slot_start(cache, strides, slot, head, BLOCK_SIZE: tl.constexpr):
    """The address of a head's key in a slot, for blocks of slots and heads. The value follows the key."""
    page, place = (slot // BLOCK_SIZE).to(tl.int64), slot % BLOCK_SIZE
    return cache + page * strides[0] + head.to(tl.int64) * strides[1] + place * strides[2]


@triton.jit
def to_cache_dtype(x, scale, FP8: tl.constexpr):
    """x as the cache stores it: unchanged, or x / scale within fp8's range. NaN stays NaN. scale: a pointer or None."""
    if scale is not None:
        x = x.to(tl.float32) / tl.load(scale)
    if FP8:
        x = tl.clamp(x.to(tl.float32), -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x
