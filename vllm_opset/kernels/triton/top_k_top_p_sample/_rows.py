"""Code that the kernels of top_k_top_p_sample share: data on rows and chunks, settings, candidate lists, the argmax.

`read` describes how the kernels work together, and what an exponential argmax is.
"""

import triton
import triton.language as tl

from vllm_opset.kernels.triton.top_k_top_p_sample._search import INFINITY, divided, exponential, weight_of
from vllm_opset.ops.sampling.top_k_top_p_sample import GREEDY_BELOW as _GREEDY_BELOW

GREEDY_BELOW = tl.constexpr(_GREEDY_BELOW)
TEMPERATURE, TOP_K, TOP_P, MIN_P = (tl.constexpr(1 << bit) for bit in range(4))  # bits of the settings that are given
# Tokens of one step of an exponential argmax. One block of the generator gives the random words of four of them.
ARGMAX_BLOCK = tl.constexpr(1024)

# Integers of a row: the numbers of candidates that `read` and `reread` listed, the strategy that samples its token, the
# key of the cut-off, and the last index that is kept at the cut-off. The counters are padded to a cache line.
LISTED, RELISTED, STRATEGY, CUT, LAST = (tl.constexpr(place) for place in range(5))
NUM_INTS = tl.constexpr(32)
# Strategies: search the list of `read` for the cut-off; sample in `read` and reject tokens that top-p drops; search the
# list of `reread`; or sample in `reread` and reject.
SEARCH_LIST, REJECTION, SEARCH_CLOSER_LIST, LATE_REJECTION = (tl.constexpr(strategy) for strategy in range(4))
# Floats of a row: the bounds of `read` and of `reread`, the largest x, the logarithm of the sum of the kept weights,
# and the standard deviation of the sample. ESTIMATE is the estimated logit of top-p's cut-off, or inf if it is not
# needed. ABOVE and BELOW are the reach of the pivots above and below this estimate.
LOW, HIGH, CLOSER_LOW, CLOSER_HIGH, MAX_X, TOTAL, DEVIATION, ESTIMATE, ABOVE, BELOW, NUM_FLOATS = (
    tl.constexpr(place) for place in range(11)
)
# Floats of a chunk: its largest logit, the scores of its first and second sampled token, and three sums of weights, as
# multiples of the largest logit's weight. The sums are over all tokens, over the tokens from the first bound on, and
# over the tokens that are certain to be kept or, with rejection, come before the row's first sampled token.
CHUNK_MAX, CHUNK_SCORE, CHUNK_SECOND, CHUNK_TOTAL, CHUNK_LISTED, CHUNK_CERTAIN, NUM_PARTS = (
    tl.constexpr(place) for place in range(7)
)
NUM_SAMPLED = tl.constexpr(2)  # sampled tokens of a chunk: with rejection, a second one in case the first is dropped
# The relative error of fp32 sums of weights. A list counts as complete only if its sum exceeds the goal by this.
SUM_ERROR = tl.constexpr(1e-5)
NUM_PIVOTS = tl.constexpr(16)  # logits of a row above which weights are added up


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
def list_candidates(logit, place, among, listed, listed_logits, listed_ids, row, capacity):
    """Writes candidates in any order, up to the capacity. They are so few that atomics are cheaper than a scan."""
    slot = tl.atomic_add(listed + tl.zeros_like(place), 1, among, sem="relaxed")
    first = row.to(tl.int64) * capacity
    tl.store(listed_logits + first + slot, logit, among & (slot < capacity))
    tl.store(listed_ids + first + slot, place, among & (slot < capacity))


@triton.jit
def update_argmax(
    best_score, best_token, line, column_stride, first, bound, last, top, scale, seed, vocab_size, BY_X: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Adds the tokens of a chunk to an exponential argmax, if they come before the token `last` at `bound`.

    Returns the ARGMAX_BLOCK best scores, as multiples of the weight of `top`, and their tokens. BY_X: whether the bound
    is an x instead of a logit.
    """
    for place in range(first, first + CHUNK, ARGMAX_BLOCK):
        words = tl.randint4x(seed, place // 4 + tl.arange(0, ARGMAX_BLOCK // 4))
        words = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3])).reshape(ARGMAX_BLOCK)
        token = place + tl.arange(0, ARGMAX_BLOCK)
        logit = tl.load(line + token.to(tl.int64) * column_stride, token < vocab_size, -INFINITY).to(tl.float32)
        value = logit
        if BY_X:
            value = divided(logit, scale)
        score = weight_of(logit, top, scale) / exponential(words)
        score = tl.where(precedes(value, token, bound, last), score, -1.0)
        better = score > best_score  # the first of equal scores is kept
        best_score, best_token = tl.where(better, score, best_score), tl.where(better, token, best_token)
    return best_score, best_token


@triton.jit
def precedes(value, token, bound, last):
    """Whether tokens come before the token `last`, whose value is `bound`, in the order in which top-p takes them."""
    return (value > bound) | ((value == bound) & (token < last))


@triton.jit
def chunk_argmax(
    line, column_stride, first, bound, last, top, scale, seed, vocab_size, BY_X: tl.constexpr, CHUNK: tl.constexpr
):
    """The best score and the sampled token of one chunk; see `update_argmax`."""
    best_score, best_token = empty_argmax(vocab_size, ARGMAX_BLOCK)
    best_score, best_token = update_argmax(
        best_score, best_token, line, column_stride, first, bound, last, top, scale, seed, vocab_size, BY_X, CHUNK
    )
    return reduce_argmax(best_score, best_token, vocab_size)


@triton.jit
def pivots_of(bounds):
    """Rising logits around the estimated cut-off of top-p. The closer they are to it, the denser they are."""
    place = (tl.arange(0, NUM_PIVOTS) - NUM_PIVOTS // 2) / (NUM_PIVOTS // 2)
    reach = tl.where(place > 0, tl.load(bounds + ABOVE), tl.load(bounds + BELOW))
    return tl.load(bounds + ESTIMATE) + reach * place * tl.abs(place)


@triton.jit
def empty_argmax(vocab_size, COUNT: tl.constexpr):
    """Scores below those of all tokens, and vocab_size in place of a token."""
    return tl.full((COUNT,), -1.0, tl.float32), tl.full((COUNT,), 0, tl.int32) + vocab_size


@triton.jit
def reduce_argmax(scores, tokens, vocab_size):
    """The best score, and the lowest token that has it."""
    score = tl.max(scores, 0)
    return score, tl.min(tl.where(scores == score, tokens, vocab_size), 0)
