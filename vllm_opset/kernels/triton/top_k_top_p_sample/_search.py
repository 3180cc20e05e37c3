"""Operations of top_k_top_p_sample on values, and its search for a cut-off: the highest key that enough items reach.

Items are tokens of a row: listed candidates, or runs of neighbours in the row itself. Keys are integers in the order of
the values.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
INFINITY = tl.constexpr(float("inf"))
LOWEST_KEY = tl.constexpr(-2139095041)  # of −inf
# Weight 1 in fixed point. The weights of 2²² tokens fit, and the rounding error is below 1e-12 of the largest weight.
ONE = tl.constexpr(2.0**40)
RUN = tl.constexpr(8)  # neighbours that are sampled together: 32 bytes of fp32
ITEMS = tl.constexpr(1024)  # items of one step of a search
FEW = tl.constexpr(1024)  # fewer candidates are searched in registers; three numbers of them fit 32 bits


@triton.jit
def search(
    TIES: tl.constexpr, counting, goal, low, high, precision, floor, least, top,
    line, listed_logits, listed_ids, column_stride, number, run, listed, scale,
):  # fmt: skip
    """The highest key up to `high` such that the items at or above it sum to `goal`; `low` if there is none.

    The result may be lower than that by up to `precision`.
    """
    zero = tl.full((), 0, tl.int64)
    first, last = zero + low, zero + high
    while last - first > precision:
        step = (last - first + 3) // 4
        reached = reached_at(
            min(first + step, last).to(tl.int32), min(first + 2 * step, last).to(tl.int32),
            min(first + 3 * step, last).to(tl.int32), TIES, counting, floor, least, top,
            line, listed_logits, listed_ids, column_stride, number, run, listed, scale,
        )  # fmt: skip
        steps = min(tl.sum((reached >= goal).to(tl.int64), 0), 3)
        if steps < 3:
            last = min(first + step * (steps + 1), last) - 1
        first = min(first + step * steps, last)
    return first.to(tl.int32)


@triton.jit
def kth_key_of_few(k, low, high, listed_logits, number, scale):
    """The highest key up to `high` that at least k of fewer than FEW candidates reach; `low` if there is none.

    The candidates stay in registers, and a step counts those above three keys in one sum of 10 bits each.
    """
    item = tl.arange(0, FEW)
    key = key_of(divided(tl.load(listed_logits + item, item < number, -INFINITY), scale))
    zero = tl.full((), 0, tl.int64)
    first, last = zero + low, zero + high
    while last > first:
        step = (last - first + 3) // 4
        one, two, three = min(first + step, last), min(first + 2 * step, last), min(first + 3 * step, last)
        counts = tl.sum(
            (key >= one.to(tl.int32)).to(tl.int32)
            + ((key >= two.to(tl.int32)).to(tl.int32) << 10)
            + ((key >= three.to(tl.int32)).to(tl.int32) << 20),
            0,
        )
        if (counts >> 20) >= k:
            first = three
        elif ((counts >> 10) & 1023) >= k:
            first, last = two, three - 1
        elif (counts & 1023) >= k:
            first, last = one, two - 1
        else:
            last = one - 1
    return first.to(tl.int32)


@triton.jit
def reached_at(
    one, two, three, TIES: tl.constexpr, counting, floor, least, top,
    line, listed_logits, listed_ids, column_stride, number, run, listed, scale,
):  # fmt: skip
    """The sums over the items at or above each of three keys: int64 [4] in no particular order, the third sum twice.

    The sums are weights of the items that pass floor and min-p. With `counting` they are numbers of items. With TIES
    they are numbers of items whose key is `floor`, and the three keys are compared with −1 − token instead.
    """
    sums = tl.zeros((ITEMS, 4), tl.int64)
    for first in range(0, number, ITEMS):
        item = first + tl.arange(0, ITEMS)
        x = x_of(item, line, listed_logits, column_stride, number, run, listed, scale)
        own = key_of(x)
        if TIES:
            amount = (own == floor).to(tl.int64)
            own = -1 - token_of(item, listed_ids, number, run, listed)
        else:
            weight = tl.exp2((x - top) * LOG2E)
            weight = tl.where(weight >= least, weight, 0.0)
            if counting:
                weight = tl.where(own > LOWEST_KEY, 1 / ONE, 0.0)
            amount = in_fixed_point(tl.where(own >= floor, weight, 0.0))
        third = tl.where(own >= three, amount, 0)
        others = tl.join(tl.where(own >= one, amount, 0), tl.where(own >= two, amount, 0))
        sums += tl.join(others, tl.join(third, third)).reshape(ITEMS, 4)
    return tl.sum(sums, 0)


@triton.jit
def x_of(item, line, listed_logits, column_stride, number, run, listed, scale):
    """x of the items: candidates if `listed`, else runs of tokens. Beyond their number it is −inf."""
    if listed:
        logit = tl.load(listed_logits + item, item < number, -INFINITY).to(tl.float32)
    else:
        token = item // RUN * run + item % RUN
        logit = tl.load(line + token.to(tl.int64) * column_stride, item < number, -INFINITY).to(tl.float32)
    return divided(logit, scale)


@triton.jit
def token_of(item, listed_ids, number, run, listed):
    token = item // RUN * run + item % RUN
    if listed:
        token = tl.load(listed_ids + item, item < number, 0)
    return token


@triton.jit
def is_kept(x, token, cut, last, least, top):
    """Whether tokens are kept: above the cut-off, or at it up to the index `last`, and also by min-p."""
    key = key_of(x)
    return ((key > cut) | ((key == cut) & (token <= last))) & kept_by_min_p(x, top, least)


@triton.jit
def kept_by_min_p(x, top, least):
    return tl.exp2((x - top) * LOG2E) >= least


@triton.jit
def divided(logit, scale):
    """logit / scale, rounded exactly as in PyTorch, because it matters which x are equal.

    This is the product with the rounded reciprocal, with Markstein's correction.
    """
    reciprocal = tl.div_rn(1.0, scale)
    product = logit * reciprocal
    corrected = tl.fma(tl.fma(-product, scale, logit), reciprocal, product)
    return tl.where(tl.abs(product) < INFINITY, corrected, product)


@triton.jit
def weight_of(logit, top, scale):
    """The weights of logits, as multiples of the weight of the logit `top`."""
    return tl.exp2((logit - tl.where(top == -INFINITY, 0.0, top)) * (LOG2E / scale))


@triton.jit
def in_fixed_point(weight):
    return (weight * ONE).to(tl.int64)


@triton.jit
def key_of(x):
    """Integer keys in the order of the values. Both zeros have the same key."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The inverse of `key_of`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
