"""The device code that the kernels of paged_attention share.

The rows of a query tile are query tokens times the query heads of one KV head, so each key and value is loaded once for
all of them. Scores and their stats are in units of log2, for exp2.
"""

import triton
import triton.language as tl

from vllm_opset.kernels.triton.paged_attention import _call

STATS = tl.constexpr(_call.STATS)
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e38)  # the maximum of no scores; finite, so that differences of stats are never NaN
# The log2 of the largest probability in fp16, whose numbers end at 2^16 and 2^-24: so those of rare keys do not vanish.
FP16_PEAK = tl.constexpr(14)
EXPONENT_BITS = tl.constexpr(0x7F800000)  # of fp32
SQUARE_OF_ONE = tl.constexpr(0x7F000000)  # twice the exponent bits of 1.0: those of a power of two and of its inverse
# A row of smaller numbers has scores near zero. Products of this one and other factors of scores are not zero.
LEAST_POWER = tl.constexpr(2.0**-64)


@triton.jit
def load_queries(
    query, query_strides, first_token, head, num_rows,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Loads a query tile; zeros in rows and columns that do not exist."""
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    place = query + (first_token + row // GROUP).to(tl.int64) * query_strides[0]
    place += (head * GROUP + row % GROUP) * query_strides[1]
    mask = (row < num_rows)[:, None] & (column < HEAD_SIZE)[None, :]
    return tl.load(place[:, None] + column[None, :] * query_strides[2], mask, 0.0)


@triton.jit
def seen_by_all(
    first, last, first_position, last_position, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The range of keys that is visible to all these queries, in whole blocks counted from `first`."""
    seen_first, seen_last = first, last
    if LEFT is not None:
        seen_first = first + tl.cdiv(max(0, last_position - LEFT - first), BLOCK_N) * BLOCK_N
    if RIGHT is not None:
        seen_last = min(last, first_position + RIGHT + 1)
    seen_last = first + max(0, seen_last - first) // BLOCK_N * BLOCK_N
    seen_first = min(seen_first, last)
    return seen_first, max(seen_first, seen_last)


@triton.jit
def attend(
    q, head, first_position, scale, soft_cap, alibi_slopes, keys, cache_strides, pages, page_stride,
    first, last, full_first, full_last, low,
    GROUP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The online softmax over the keys first … last - 1. Keys full_first … full_last - 1 are visible to all queries.

    first, full_first and full_last are multiples of BLOCK_N. No key before `low` is visible to any query. Returns acc
    (the weighted sum of the values), m_i and l_i. A weight is exp2 of its score less m_i, and l_i is their sum.

    An fp8 cache is multiplied in fp16 where queries are in bf16. GPUs convert fp8 to two numbers of fp16 at a time. For
    bf16, an H200 converts each of these once more, in a unit with a quarter of the rate.
    """
    row_scale = None
    if keys.dtype.element_ty.is_fp8() and q.dtype == tl.bfloat16:
        q, row_scale = _in_fp16(q)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    row = tl.arange(0, BLOCK_M)
    position = first_position + row // GROUP
    slope = None
    if alibi_slopes is not None:
        slope = tl.load(alibi_slopes + head * GROUP + row % GROUP) * LOG2E
    if full_first < full_last:
        acc, m_i, l_i = _attend(
            acc, m_i, l_i, q, row_scale, position, slope, scale, soft_cap, keys, cache_strides, pages, page_stride,
            full_first, full_last, full_last, 0, low, last,
            False, LEFT, RIGHT, HEAD_SIZE, BLOCK_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    full = full_last - full_first
    if first < last - full:
        acc, m_i, l_i = _attend(
            acc, m_i, l_i, q, row_scale, position, slope, scale, soft_cap, keys, cache_strides, pages, page_stride,
            first, last - full, full_first, full, low, last,
            True, LEFT, RIGHT, HEAD_SIZE, BLOCK_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    return acc, m_i, l_i


@triton.jit
def _in_fp16(q):
    """The rows of q in fp16, and the powers of two by which they are divided, so that no element exceeds 2."""
    q = q.to(tl.float32)
    power, inverse = power_of_rows(q)
    return (q * inverse[:, None]).to(tl.float16), power


@triton.jit
def power_of_rows(q):
    """The power of two of each row's largest magnitude, and its inverse.

    The inverse takes no division, and is exact below 2^127.
    """
    largest = tl.max(tl.abs(q), 1)
    power = (largest.to(tl.int32, bitcast=True) & EXPONENT_BITS).to(tl.float32, bitcast=True)
    power = tl.maximum(power, LEAST_POWER)
    return power, (-power.to(tl.int32, bitcast=True) + SQUARE_OF_ONE).to(tl.float32, bitcast=True)


@triton.jit
def _attend(
    acc, m_i, l_i, q, row_scale, position, slope, scale, soft_cap, keys, cache_strides, pages, page_stride,
    first, last, gap, gap_length, low, high,
    MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Continues over the keys first … last - 1, where keys from `gap` on lie gap_length further on.

    MASKED: whether some of them are below `low`, at or beyond `high`, or invisible to some query. The block table's
    entries of the next block are loaded while this one is attended, so that its keys can be requested at once.
    """
    column = tl.arange(0, BLOCK_D)
    following = _start(first, gap, gap_length, MASKED)
    page = _page(pages, page_stride, following, first < last, low, high, MASKED, BLOCK_SIZE, BLOCK_N)
    for counted in range(first, last, BLOCK_N):
        start = _start(counted, gap, gap_length, MASKED)
        key_position = start + tl.arange(0, BLOCK_N)
        inside = None
        if MASKED:
            inside = (key_position >= low) & (key_position < high)
        slot = page.to(tl.int64) * cache_strides[0] + _offset(start, BLOCK_SIZE, BLOCK_N) * cache_strides[2]
        place = keys + slot[:, None] + column[None, :] * cache_strides[3]
        following = _start(counted + BLOCK_N, gap, gap_length, MASKED)
        more = counted + BLOCK_N < last
        page = _page(pages, page_stride, following, more, low, high, MASKED, BLOCK_SIZE, BLOCK_N)

        k = _load_rows(place, inside, column, HEAD_SIZE, BLOCK_D).to(q.dtype)
        score = tl.dot(q, k.T, input_precision="ieee")
        if row_scale is not None:
            score *= row_scale[:, None]
        scale_log2 = scale * LOG2E
        if soft_cap is not None:  # with tanh as in _formulas
            score = (2 * tl.sigmoid(score * (2 * scale / soft_cap)) - 1) * (soft_cap * LOG2E)
            scale_log2 = 1.0
        if slope is not None:
            distance = key_position[None, :] - position[:, None]
            score = score * scale_log2 + slope[:, None] * distance
            scale_log2 = 1.0
        if MASKED:
            visible = is_visible(key_position[None, :] - position[:, None], inside[None, :], LEFT, RIGHT)
            score = tl.where(visible, score, float("-inf"))

        peak = tl.max(score, 1) * scale_log2
        if q.dtype == tl.float16:
            peak -= FP16_PEAK
        m_new = tl.maximum(m_i, peak)
        p = tl.exp2(score * scale_log2 - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = _load_rows(place + HEAD_SIZE * cache_strides[3], inside, column, HEAD_SIZE, BLOCK_D).to(q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m_i = m_new
    return acc, m_i, l_i


@triton.jit
def is_visible(distance, inside, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """The mask. distance: key position - query position; inside: whether the key exists.

    It takes as few instructions as possible. One unsigned comparison serves both sides of a window. With RIGHT = 0,
    keys that do not exist are beyond the right side anyway.
    """
    visible = inside
    if LEFT is not None and RIGHT is not None:
        visible = (distance + LEFT).to(tl.uint32, bitcast=True) <= LEFT + RIGHT
    elif RIGHT is not None:
        visible = distance <= RIGHT
    elif LEFT is not None:
        visible = distance >= -LEFT
    if RIGHT is not None and RIGHT == 0:
        return visible
    return visible & inside


@triton.jit
def _start(counted, gap, gap_length, MASKED: tl.constexpr):
    """The position of a key, from its count without the gap."""
    return counted + tl.where(counted >= gap, gap_length, 0) if MASKED else counted


@triton.jit
def _page(
    pages, page_stride, start, exists, low, high,
    MASKED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The block number of each key start … start + BLOCK_N - 1; 0 for keys outside of low … high - 1."""
    index = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:  # all in one page
        place = start // BLOCK_SIZE * page_stride + index * 0
    elif BLOCK_N % BLOCK_SIZE == 0:  # in as many pages as it takes
        place = start // BLOCK_SIZE * page_stride + index // BLOCK_SIZE * page_stride
    else:
        place = (start + index) // BLOCK_SIZE * page_stride
    if MASKED:
        exists = exists & (start + index >= low) & (start + index < high)
    return tl.load(pages + place, exists, 0)


@triton.jit
def _offset(start, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The offset of each key in its block of the cache."""
    index = tl.arange(0, BLOCK_N)
    if BLOCK_N % BLOCK_SIZE == 0:
        return index % BLOCK_SIZE
    return start % BLOCK_SIZE + index if BLOCK_SIZE % BLOCK_N == 0 else (start + index) % BLOCK_SIZE


@triton.jit
def _load_rows(place, inside, column, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Loads keys or values. Zeros, without a read, for those that are not inside and for columns beyond the head."""
    if inside is not None:
        mask = inside[:, None] & (column < HEAD_SIZE)[None, :] if BLOCK_D != HEAD_SIZE else inside[:, None]
        rows = tl.load(place, mask, 0.0)
    elif BLOCK_D != HEAD_SIZE:
        rows = tl.load(place, (column < HEAD_SIZE)[None, :], 0.0)
    else:
        rows = tl.load(place)
    return rows
