"""Code that the kernels of top_k_top_p_sample share: their data on rows and chunks, settings, candidate lists, races.

`read` describes how the kernels work together.
"""

import triton
import triton.language as tl

from vllm_opset.kernels.triton.top_k_top_p_sample._search import INFINITY, divided, exponential, weight_of
from vllm_opset.ops.sampling.top_k_top_p_sample import GREEDY_BELOW as _GREEDY_BELOW

GREEDY_BELOW = tl.constexpr(_GREEDY_BELOW)
TEMPERATURE, TOP_K, TOP_P, MIN_P = (tl.constexpr(1 << bit) for bit in range(4))  # bits of the settings that are given
RACERS = tl.constexpr(1024)  # tokens that race together; one block of the generator gives the words of four of them

# Integers of a row: the numbers of candidates that `read` and `reread` listed, the way to the row's token, the key of
# the cut-off, and the last index that is kept at the cut-off. The counters are padded to a cache line.
LISTED, RELISTED, WAY, CUT, LAST = (tl.constexpr(place) for place in range(5))
NUM_INTS = tl.constexpr(32)
# Ways to a token: cut the list of `read`; race in `read` and reject dropped winners; cut the list of `reread`; or race
# in `reread` and reject dropped winners.
CUT_LIST, RACE, CUT_CLOSER_LIST, RACE_LATE = (tl.constexpr(way) for way in range(4))
# Floats of a row: the bounds of `read` and of `reread`, the largest x, the logarithm of the sum of the kept weights,
# and the standard deviation of the sample. ESTIMATE is the estimated logit of top-p's cut-off, or inf if it is not
# needed. ABOVE and BELOW are the reach of the pivots above and below this estimate.
LOW, HIGH, CLOSER_LOW, CLOSER_HIGH, TOP, TOTAL, DEVIATION, ESTIMATE, ABOVE, BELOW, NUM_FLOATS = (
    tl.constexpr(place) for place in range(11)
)
# Floats of a chunk: its largest logit, the best score, the best score of the second race, and three sums of weights, as
# multiples of the largest logit's weight. The sums are over all tokens, over the tokens from the first bound on, and
# over the tokens that are certain to be kept or, in a race, ahead of the winner.
CHUNK_TOP, CHUNK_SCORE, CHUNK_SECOND, CHUNK_TOTAL, CHUNK_LISTED, CHUNK_CERTAIN, NUM_PARTS = (
    tl.constexpr(place) for place in range(7)
)
NUM_WINNERS = tl.constexpr(2)  # winners of a chunk: of the first and of the second race
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
def race(
    best, winner, line, column_stride, first, bound, last, top, scale, seed, vocab_size, BY_X: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Adds the tokens of a chunk to a race, if they are ahead of the token `last` at `bound`.

    Returns the RACERS best scores, as multiples of the weight of `top`, and their tokens. BY_X: whether the bound is an
    x instead of a logit.
    """
    for place in range(first, first + CHUNK, RACERS):
        words = tl.randint4x(seed, place // 4 + tl.arange(0, RACERS // 4))
        words = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3])).reshape(RACERS)
        token = place + tl.arange(0, RACERS)
        logit = tl.load(line + token.to(tl.int64) * column_stride, token < vocab_size, -INFINITY).to(tl.float32)
        value = logit
        if BY_X:
            value = divided(logit, scale)
        score = weight_of(logit, top, scale) / exponential(words)
        score = tl.where(is_ahead(value, token, bound, last), score, -1.0)
        better = score > best  # the first of equal scores wins
        best, winner = tl.where(better, score, best), tl.where(better, token, winner)
    return best, winner


@triton.jit
def is_ahead(value, token, bound, last):
    """Whether tokens come before the token `last`, whose value is `bound`, in the order in which top-p takes them."""
    return (value > bound) | ((value == bound) & (token < last))


@triton.jit
def race_alone(
    line, column_stride, first, bound, last, top, scale, seed, vocab_size, BY_X: tl.constexpr, CHUNK: tl.constexpr
):
    """The score and the winner of the race in one chunk; see `race`."""
    best, racer = nobody(vocab_size, RACERS)
    best, racer = race(best, racer, line, column_stride, first, bound, last, top, scale, seed, vocab_size, BY_X, CHUNK)
    return first_of_best(best, racer, vocab_size)


@triton.jit
def pivots_of(bounds):
    """Rising logits around the estimated cut-off of top-p. The closer they are to it, the denser they are."""
    place = (tl.arange(0, NUM_PIVOTS) - NUM_PIVOTS // 2) / (NUM_PIVOTS // 2)
    reach = tl.where(place > 0, tl.load(bounds + ABOVE), tl.load(bounds + BELOW))
    return tl.load(bounds + ESTIMATE) + reach * place * tl.abs(place)


@triton.jit
def nobody(vocab_size, COUNT: tl.constexpr):
    return tl.full((COUNT,), -1.0, tl.float32), tl.full((COUNT,), 0, tl.int32) + vocab_size


@triton.jit
def first_of_best(scores, tokens, vocab_size):
    score = tl.max(scores, 0)
    return score, tl.min(tl.where(scores == score, tokens, vocab_size), 0)
