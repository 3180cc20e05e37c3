"""Code that the kernels of top_k_top_p_sample share: data on rows and chunks, settings, candidate lists, the argmax.

`read` describes how the kernels work together, and what an exponential argmax is.
"""

import triton
import triton.language as tl

from vllm_opset.kernels.triton.top_k_top_p_sample._noise import WORDS, noise_of, noise_of_block
from vllm_opset.kernels.triton.top_k_top_p_sample._search import INFINITY, divided, kept_by_min_p, weight_of
from vllm_opset.ops.sampling.top_k_top_p_sample import GREEDY_BELOW as _GREEDY_BELOW

GREEDY_BELOW = tl.constexpr(_GREEDY_BELOW)
TEMPERATURE, TOP_K, TOP_P, MIN_P = (tl.constexpr(1 << bit) for bit in range(4))  # bits of the settings that are given
# From so many candidates of a block on, a scan and one atomic operation are cheaper than one operation for each.
SCAN_FROM = tl.constexpr(16)
ARGMAX_BLOCK = tl.constexpr(512)  # tokens of one step of an exponential argmax

# Integers of a row: the numbers of candidates that `read` and `reread` listed, the strategy that samples its token, the
# key of the cut-off, the last index that is kept at the cut-off, and with rejection the number of rivals that beat the
# sampled token, and these rivals. The number is −1 if the bounds were wrong. Rows are padded to a cache line.
LISTED, RELISTED, STRATEGY, CUT, LAST, NUM_RIVALS, RIVALS = (tl.constexpr(place) for place in range(7))
NUM_INTS = tl.constexpr(32)
MOST_RIVALS = tl.constexpr(16)  # rivals that a row may have in these integers
# USE_LIST samples from the list of `read`. SEARCH_CLOSER_LIST searches the list of `reread` for the cut-off. REJECTION
# rejects rivals that `read` listed, and LATE_REJECTION those that `reread` listed. SAMPLED is the token of `reread`.
USE_LIST, SEARCH_CLOSER_LIST, REJECTION, LATE_REJECTION, SAMPLED = (tl.constexpr(strategy) for strategy in range(5))
# What `finish` finds in the row's buffers depends on the strategy:
#
# - USE_LIST: the list has the LISTED tokens from LOW on.
# - SEARCH_CLOSER_LIST: the list has the RELISTED tokens from CLOSER_LOW to CLOSER_HIGH, and CHUNK_CERTAIN the weight of
#   those from CLOSER_HIGH on.
# - REJECTION: RIVALS has the NUM_RIVALS rivals, and the pivot sums have the weight before each of them. If NUM_RIVALS
#   is −1, the list has the RELISTED tokens from CLOSER_LOW on, and the first pivot sum of a chunk has their weight.
# - LATE_REJECTION: the list has the RELISTED rivals below LOW, and CHUNK_LISTED the weight of the tokens from LOW on.
# - SAMPLED: the chunks' scores and tokens say all.
# Floats of a row: the bounds of `read` and of `reread`, the largest x, the logarithm of the sum of the kept weights,
# and the standard deviation of the sample. ESTIMATE is the estimated logit of top-p's cut-off, or inf if it is not
# needed. ABOVE and BELOW are the reach of the pivots above and below this estimate. REFERENCE is the largest logit of
# the sample. LEAST_SCORE is a score that some token at or above the upper bound has, as a multiple of its weight.
(
    LOW, HIGH, CLOSER_LOW, CLOSER_HIGH, MAX_X, TOTAL, DEVIATION, ESTIMATE, ABOVE, BELOW, REFERENCE, LEAST_SCORE,
    NUM_FLOATS,
) = (tl.constexpr(place) for place in range(13))  # fmt: skip
# Floats of a chunk: its largest logit, the score of its sampled token, and three sums of weights, as multiples of the
# largest logit's weight. The sums are over all tokens, over the tokens from the first bound on, and over the tokens
# from the second bound on, which are certain to be kept.
CHUNK_MAX, CHUNK_SCORE, CHUNK_TOTAL, CHUNK_LISTED, CHUNK_CERTAIN, NUM_PARTS = (
    tl.constexpr(place) for place in range(6)
)
# The relative error of fp32 sums of weights. A list counts as complete only if its sum exceeds the goal by this.
SUM_ERROR = tl.constexpr(1e-5)
# Sums of weights of a chunk: above logits around the estimated cut-off or, with rejection, before each rival.
NUM_PIVOTS = tl.constexpr(16)


@triton.jit
def settings_of(row, given, settings, strides, vocab_size):
    """The settings of a row: divisor, whether it is greedy, k or 0, p or 1, min-p or 0. `given`: a bit per setting."""
    temperature = tl.load(settings[0] + row * strides[0], (given & TEMPERATURE) != 0, 1.0)
    k = tl.load(settings[1] + row * strides[1], (given & TOP_K) != 0, 0).to(tl.int32)
    p = tl.load(settings[2] + row * strides[2], (given & TOP_P) != 0, 1.0)
    least = tl.load(settings[3] + row * strides[3], (given & MIN_P) != 0, 0.0)
    greedy = temperature < GREEDY_BELOW
    return tl.where(greedy, 1.0, temperature), greedy, tl.where(k < vocab_size, k, 0), p, least


@triton.jit
def list_candidates(logit, place, among, listed, listed_logits, listed_ids, row, capacity, MANY: tl.constexpr):
    """Writes candidates in any order, up to the capacity.

    MANY: whether they may be so many that a scan is cheaper than an atomic operation for each.
    """
    number = tl.sum(among.to(tl.int32), 0)
    if number > 0:
        if MANY:
            if number >= SCAN_FROM:
                slot = tl.atomic_add(listed, number, sem="relaxed") + tl.cumsum(among.to(tl.int32), 0) - 1
            else:
                slot = tl.atomic_add(listed + tl.zeros_like(place), 1, among, sem="relaxed")
        else:
            slot = tl.atomic_add(listed + tl.zeros_like(place), 1, among, sem="relaxed")
        first = row.to(tl.int64) * capacity
        tl.store(listed_logits + first + slot, logit, among & (slot < capacity))
        tl.store(listed_ids + first + slot, place, among & (slot < capacity))


@triton.jit
def update_argmax(best_weight, best_noise, best_token, weight, noise, token):
    """Adds tokens to an exponential argmax, which has the largest weight / noise. Weights of zero are never taken.

    The product with the other noise is much cheaper than a quotient. The first of equal scores is kept.
    """
    better = weight * best_noise > best_weight * noise
    return (
        tl.where(better, weight, best_weight),
        tl.where(better, noise, best_noise),
        tl.where(better, token, best_token),
    )


@triton.jit
def chunk_argmax(
    line, column_stride, first, low, high, least_score, top, scale, seed, vocab_size,
    rivals, listed_logits, listed_ids, row, capacity, RIVALS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The best score and the sampled token of the tokens of a chunk at or above `high`; 0 and vocab_size for none.

    Scores are multiples of the weight of `top`. With RIVALS, it also lists the tokens between the bounds whose score is
    above `least_score`; `rivals` counts them.
    """
    best_weight, best_noise, best_token = empty_argmax(vocab_size, ARGMAX_BLOCK)
    for place in range(first, first + CHUNK, ARGMAX_BLOCK):
        token = place + tl.arange(0, ARGMAX_BLOCK)
        logit = tl.load(line + token.to(tl.int64) * column_stride, token < vocab_size, -INFINITY).to(tl.float32)
        weight = weight_of(logit, top, scale)
        noise = noise_of_block(seed, tl.arange(0, ARGMAX_BLOCK // WORDS) + place // WORDS)
        if RIVALS:
            among = (logit >= low) & (logit < high) & (weight > least_score * noise)
            list_candidates(logit, token, among, rivals, listed_logits, listed_ids, row, capacity, False)
        best_weight, best_noise, best_token = update_argmax(
            best_weight, best_noise, best_token, tl.where(logit >= high, weight, 0.0), noise, token
        )
    return reduce_argmax(best_weight / best_noise, best_token, vocab_size)


@triton.jit
def least_score_of(bounds, top, scale):
    """The score that rivals of a row must exceed, as a multiple of the weight of `top`."""
    return tl.load(bounds + LEAST_SCORE) * weight_of(tl.load(bounds + REFERENCE), top, scale)


@triton.jit
def precedes(value, token, bound, last):
    """Whether tokens come before the token `last`, whose value is `bound`, in the order in which top-p takes them."""
    return (value > bound) | ((value == bound) & (token < last))


@triton.jit
def pivots_of(bounds):
    """Rising logits around the estimated cut-off of top-p. The closer they are to it, the denser they are."""
    place = (tl.arange(0, NUM_PIVOTS) - NUM_PIVOTS // 2) / (NUM_PIVOTS // 2)
    reach = tl.where(place > 0, tl.load(bounds + ABOVE), tl.load(bounds + BELOW))
    return tl.load(bounds + ESTIMATE) + reach * place * tl.abs(place)


@triton.jit
def empty_argmax(vocab_size, COUNT: tl.constexpr):
    """Weights of zero, noise, and vocab_size in place of a token."""
    weight = tl.zeros((COUNT,), tl.float32)
    return weight, weight + 1.0, tl.full((COUNT,), 0, tl.int32) + vocab_size


@triton.jit
def reduce_argmax(scores, tokens, vocab_size):
    """The best score, and the lowest token that has it."""
    score = tl.max(scores, 0)
    return score, tl.min(tl.where(scores == score, tokens, vocab_size), 0)


@triton.jit
def best_listed(
    bound, last, least, listed_logits, listed_ids, number, top, scale, seed, vocab_size, ITEMS: tl.constexpr
):
    """The best score of the listed tokens that come before `last`, whose x is `bound`, and its token.

    It leaves out tokens that `least`, a min-p, drops.
    """
    best_score, best_token = tl.zeros((ITEMS,), tl.float32), tl.full((ITEMS,), 0, tl.int32) + vocab_size
    for first in range(0, number, ITEMS):
        item = first + tl.arange(0, ITEMS)
        logit = tl.load(listed_logits + item, item < number, -INFINITY)
        token = tl.load(listed_ids + item, item < number, vocab_size)
        x = divided(logit, scale)
        score = weight_of(logit, top, scale) / noise_of(seed, token)
        candidate = precedes(x, token, bound, last) & kept_by_min_p(x, divided(top, scale), least)
        score = tl.where(candidate, score, -1.0)
        better = (score > best_score) | ((score == best_score) & (token < best_token))
        best_score, best_token = tl.where(better, score, best_score), tl.where(better, token, best_token)
    return reduce_argmax(best_score, best_token, vocab_size)


@triton.jit
def x_of_token(token, line, column_stride, scale, vocab_size):
    """x of a token. For vocab_size it is −inf, so that all tokens come before it."""
    logit = tl.load(line + token.to(tl.int64) * column_stride, token < vocab_size, -INFINITY)
    return divided(logit.to(tl.float32), scale)
