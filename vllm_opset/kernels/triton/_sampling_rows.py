"""What the kernels of top_k_top_p_sample share: what they tell each other of rows and chunks, settings, lists, races.

`_sampling.py` says how they work together, and has all of them but `finish`, which is in `_sampling_finish.py`.
"""

import triton
import triton.language as tl

from vllm_opset.kernels.triton._sampling_search import INFINITY, exponential, weight_of
from vllm_opset.ops.top_k_top_p_sample import GREEDY_BELOW as _GREEDY_BELOW

GREEDY_BELOW = tl.constexpr(_GREEDY_BELOW)
TEMPERATURE, TOP_K, TOP_P, MIN_P = (tl.constexpr(1 << bit) for bit in range(4))  # which settings there are
RACERS = tl.constexpr(1024)  # raced together, the words of four from one block of the generator

# Of each row: candidates listed, the key of the cut, the last index that is kept at it. Padded to a line of the cache.
LISTED, CUT, LAST = (tl.constexpr(place) for place in range(3))
NUM_INTS = tl.constexpr(32)
# Of each row: the bounds, the largest x, the logarithm of the sum of the weights that are kept, the sample's mean and
# standard deviation.
LOW, HIGH, TOP, TOTAL, MEAN, DEVIATION, NUM_FLOATS = (tl.constexpr(place) for place in range(7))
# Of each chunk: the largest logit, the sum of the weights, as multiples of the largest in the chunk, the best score.
CHUNK_TOP, CHUNK_TOTAL, CHUNK_SCORE, NUM_PARTS = (tl.constexpr(place) for place in range(4))


@triton.jit
def settings_of(row, given, settings, strides, vocab_size):
    """Of a row: its divisor, whether it is greedy, k or 0, p or 1, and min-p or 0. `given`: a bit for each setting."""
    temperature = tl.load(settings[0] + row * strides[0], (given & TEMPERATURE) != 0, 1.0)
    k = tl.load(settings[1] + row * strides[1], (given & TOP_K) != 0, 0).to(tl.int32)
    p = tl.load(settings[2] + row * strides[2], (given & TOP_P) != 0, 1.0)
    least = tl.load(settings[3] + row * strides[3], (given & MIN_P) != 0, 0.0)
    greedy = temperature < GREEDY_BELOW
    return tl.where(greedy, 1.0, temperature), greedy, tl.where(k < vocab_size, k, 0), p, least


@triton.jit
def list_candidates(logit, place, among, listed, listed_logits, listed_ids, row, capacity):
    """Writes candidates, in any order, as far as there is room. They are too few for a scan to be cheaper."""
    slot = tl.atomic_add(listed + tl.zeros_like(place), 1, among, sem="relaxed")
    first = row.to(tl.int64) * capacity
    tl.store(listed_logits + first + slot, logit, among & (slot < capacity))
    tl.store(listed_ids + first + slot, place, among & (slot < capacity))


@triton.jit
def race(best, winner, line, column_stride, first, high, top, scale, seed, vocab_size, CHUNK: tl.constexpr):
    """Takes the tokens of a chunk that reach `high` into a race: the best scores, as multiples of the weight of `top`,
    and their tokens, RACERS of them.
    """
    for place in range(first, first + CHUNK, RACERS):
        words = tl.randint4x(seed, place // 4 + tl.arange(0, RACERS // 4))
        words = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3])).reshape(RACERS)
        token = place + tl.arange(0, RACERS)
        logit = tl.load(line + token.to(tl.int64) * column_stride, token < vocab_size, -INFINITY).to(tl.float32)
        score = tl.where(logit >= high, weight_of(logit, top, scale) / exponential(words), -1.0)
        better = score > best  # of equal ones the first
        best, winner = tl.where(better, score, best), tl.where(better, token, winner)
    return best, winner


@triton.jit
def nobody(vocab_size, COUNT: tl.constexpr):
    return tl.full((COUNT,), -1.0, tl.float32), tl.full((COUNT,), 0, tl.int32) + vocab_size


@triton.jit
def first_of_best(scores, tokens, vocab_size):
    score = tl.max(scores, 0)
    return score, tl.min(tl.where(scores == score, tokens, vocab_size), 0)
