"""The device code of top_k_top_p_sample: find few tokens that the cuts must lie among, then cut and race those.

- `start` looks at a sample of each row and guesses a logit that a few thousand tokens reach, or k, in all likelihood.
- `read` takes the rows in chunks, each by a program of its own. It lists the tokens between two bounds, `low` and
  `high`, as candidates, adds up the weights of all, and races what reaches `high`: these tokens are certain to be kept.
- `reread` does the same with closer bounds for rows whose candidates miss the cut, such as those of which top-p keeps
  many tokens. `start` estimates from the sample which rows these are; of them, `read` adds up the weights above some
  pivots, between which the closer bounds lie.
- `finish` puts the chunks of a row together. It finds the cuts by search among the candidates, if sums over these show
  that the cuts lie there, and races what is kept. If they do not lie there, it searches the whole row: slow, and right.
- `process` writes the processed logits, if they are asked for.

`reread` is in `_sampling_reread.py` and `finish` in `_sampling_finish.py`. What the kernels share is in
`_sampling_rows.py`, and the search, with what is done to a value, in `_sampling_search.py`.

Bounds are logits; what is compared with the cuts is x = logits / temperature, as integer keys in the order of the
values, searched four ways at a time. Weights are exp(x − max x), as 64-bit fixed-point numbers where the order in which
they are added is not fixed. So a row's token depends on nothing but the row.
"""

import triton
import triton.language as tl

from vllm_opset.kernels.triton._launch import begin
from vllm_opset.kernels.triton.top_k_top_p_sample._rows import (
    ABOVE,
    BELOW,
    CHUNK_LISTED,
    CHUNK_SCORE,
    CHUNK_TOP,
    CHUNK_TOTAL,
    CUT,
    CUT_LIST,
    DEVIATION,
    ESTIMATE,
    HIGH,
    LAST,
    LISTED,
    LOW,
    NUM_FLOATS,
    NUM_INTS,
    NUM_PARTS,
    NUM_PIVOTS,
    NUM_WINNERS,
    RACE,
    RELISTED,
    TOP,
    TOTAL,
    WAY,
    list_candidates,
    pivots_of,
    race_alone,
    settings_of,
)
from vllm_opset.kernels.triton.top_k_top_p_sample._search import (
    INFINITY,
    LOWEST_KEY,
    RUN,
    divided,
    is_kept,
    key_of,
    value_of,
    weight_of,
    x_of,
)

SAMPLE = tl.constexpr(4096)  # tokens of a row, at most
AMPLE = tl.constexpr(2816)  # tokens to list where the settings do not say how many
DEVIATIONS = tl.constexpr(4.0)  # by which a guess of the k-th largest from a sample stays clear of it
SMALL = tl.constexpr(8.0)  # tokens of the sample, more than those, where few make deviations meaningless
ROUGH = tl.constexpr(1 << 14)  # keys, to which a guess needs to be precise: a 512th of a value
# A sample shows less of the weight than there is above a bound, since it lacks the largest tokens. By so much less than
# top-p does it have to show before the cut is estimated.
UNSEEN = tl.constexpr(0.1)
LOWEST_PIVOT, LEAST_REACH = tl.constexpr(-1.5), tl.constexpr(0.5)  # in standard deviations of the sample
AT_PIVOTS = tl.constexpr(256)  # tokens that are compared with the pivots together


@triton.jit(do_not_specialize=["vocab_size", "given", "processed"])
def start(
    logits, logits_strides, vocab_size, given, settings, strides, processed, ints, floats,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a row: its first bounds."""
    begin(OVERLAP)
    row = tl.program_id(0)
    scale, greedy, k, p, least = settings_of(row, given, settings, strides, vocab_size)
    way, low, high, estimate = CUT_LIST, INFINITY, -INFINITY, INFINITY
    if greedy and processed == 0:
        high = INFINITY
    elif k > 0 or p < 1 or least > 0:
        high = INFINITY
        sampled, run = _sample(vocab_size)
        wanted = sampled * (AMPLE / vocab_size)
        if k > 0:
            mean = k * (sampled / vocab_size)
            wanted = mean + DEVIATIONS * tl.sqrt(mean) + SMALL
        line = logits + row.to(tl.int64) * logits_strides[0]
        x = x_of(tl.arange(0, SAMPLE), line, line, logits_strides[1], sampled, run, False, 1.0)
        low = _reached_by(x, tl.full(x.shape, 1.0, tl.float32), wanted)
        finite = x > -INFINITY
        number = tl.sum(finite.to(tl.float32), 0)
        mean = tl.sum(tl.where(finite, x, 0.0), 0) / number
        deviation = tl.sqrt(tl.sum(tl.where(finite, (x - mean) * (x - mean), 0.0), 0) / number)
        tl.store(floats + row * NUM_FLOATS + DEVIATION, deviation)
        if k == 0 and (p < 1 and least == 0):
            weight = weight_of(x, tl.max(x, 0), scale)
            total = tl.sum(weight, 0)
            if tl.sum(tl.where(x >= low, weight, 0.0), 0) < (p - UNSEEN) * total:
                if processed == 0:
                    way, low, high = RACE, INFINITY, _race_bound(x, weight, total, p)
                else:
                    estimate = _reached_by(x, weight, p * total)
                    below = max(estimate - (mean + LOWEST_PIVOT * deviation), LEAST_REACH * deviation)
                    tl.store(floats + row * NUM_FLOATS + ABOVE, low - estimate)
                    tl.store(floats + row * NUM_FLOATS + BELOW, below)
    tl.store(floats + row * NUM_FLOATS + LOW, low)
    tl.store(floats + row * NUM_FLOATS + HIGH, high)
    tl.store(floats + row * NUM_FLOATS + ESTIMATE, estimate)
    tl.store(ints + row * NUM_INTS + LISTED, 0)
    tl.store(ints + row * NUM_INTS + RELISTED, 0)
    tl.store(ints + row * NUM_INTS + WAY, way)


@triton.jit
def _sample(vocab_size):
    """How many tokens of a row are looked at to guess, and how far apart runs of them start."""
    sampled, run = vocab_size, RUN
    if vocab_size > SAMPLE:
        sampled, run = SAMPLE, vocab_size // (SAMPLE // RUN) // RUN * RUN
    return sampled, run


@triton.jit
def _race_bound(x, weight, total, p):
    """A logit that top-p's cut is not below, in all likelihood, judged from the weights of a sample."""
    error = max(p, 1 - p) * tl.sqrt(tl.sum(weight * weight, 0)) / total
    share = p + DEVIATIONS * error
    bound = -INFINITY
    if share < 1:
        bound = _reached_by(x, weight, share * total)
    return bound


@triton.jit
def _reached_by(x, amount, wanted):
    """A value that a sample reaches with amounts adding up to `wanted`, roughly; −inf if all are less."""
    key = key_of(x)
    zero = tl.full((), 0, tl.int64)
    first, last = zero + LOWEST_KEY, zero + tl.max(key, 0)
    while last - first > ROUGH:
        step = (last - first + 3) // 4
        one, two, three = first + step, min(first + 2 * step, last), min(first + 3 * step, last)
        at_one, at_two, at_three = tl.reduce(
            (
                tl.where(key >= one.to(tl.int32), amount, 0.0),
                tl.where(key >= two.to(tl.int32), amount, 0.0),
                tl.where(key >= three.to(tl.int32), amount, 0.0),
            ),
            0,
            _add_three,
        )
        if at_three >= wanted:
            first = three
        elif at_two >= wanted:
            first, last = two, three - 1
        elif at_one >= wanted:
            first, last = one, two - 1
        else:
            last = one - 1
    return value_of(first.to(tl.int32))


@triton.jit
def _add_two(a, b, x, y):
    return a + x, b + y


@triton.jit
def _add_three(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit(do_not_specialize=["vocab_size", "num_chunks", "given", "processed", "capacity"])
def read(
    logits, logits_strides, vocab_size, num_chunks, keys, given, settings, strides, processed,
    ints, floats, parts, part_ids, pivot_sums, listed_logits, listed_ids, capacity,
    CHUNK: tl.constexpr, FILTERED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program for each chunk of each row: candidates, sums of weights, and the winner of the certain tokens.

    Programs that run together have different rows, as far as there are any: the counter of a row is a bottleneck.
    """
    begin(OVERLAP)
    num_rows = tl.num_programs(0) // num_chunks
    row, chunk = tl.program_id(0) % num_rows, tl.program_id(0) // num_rows
    line = logits + row.to(tl.int64) * logits_strides[0]
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(line + place.to(tl.int64) * logits_strides[1], place < vocab_size, -INFINITY).to(tl.float32)
    low, high = INFINITY, -INFINITY
    if FILTERED:
        low, high = tl.load(floats + row * NUM_FLOATS + LOW), tl.load(floats + row * NUM_FLOATS + HIGH)
    scale, greedy, k, _, _ = settings_of(row, given, settings, strides, vocab_size)
    seed = tl.load(keys + row * strides[4])
    number = row * num_chunks + chunk
    part = parts + number * NUM_PARTS
    top = tl.max(logit, 0)
    tl.store(part + CHUNK_TOP, top)
    if FILTERED and low < INFINITY:
        among = (logit >= low) & (logit > -INFINITY)
        list_candidates(logit, place, among, ints + row * NUM_INTS + LISTED, listed_logits, listed_ids, row, capacity)
    if k == 0 and (processed != 0 or (FILTERED and not greedy)):
        weight = weight_of(logit, top, scale)
        total, listed = tl.reduce((weight, tl.where(logit >= min(low, high), weight, 0.0)), 0, _add_two)
        tl.store(part + CHUNK_TOTAL, total)
        tl.store(part + CHUNK_LISTED, listed)
        if FILTERED and processed != 0:  # noqa: SIM102  FILTERED is known when it is compiled
            if tl.load(floats + row * NUM_FLOATS + ESTIMATE) < INFINITY:
                sums = _sums_at_pivots(
                    floats + row * NUM_FLOATS, line, logits_strides[1], chunk * CHUNK, top, scale, vocab_size, CHUNK
                )
                tl.store(pivot_sums + number * NUM_PIVOTS + tl.arange(0, NUM_PIVOTS), sums)
    score, winner = -INFINITY, vocab_size
    if greedy:
        score, winner = top, tl.min(tl.where(logit == top, place, vocab_size), 0)
    elif top >= high:
        score, winner = race_alone(
            line, logits_strides[1], chunk * CHUNK, high, vocab_size, top, scale, seed, vocab_size, False, CHUNK
        )
    tl.store(part + CHUNK_SCORE, score)
    tl.store(part_ids + number * NUM_WINNERS, winner)


@triton.jit
def _sums_at_pivots(bounds, line, column_stride, first, top, scale, vocab_size, CHUNK: tl.constexpr):
    """The weights of a chunk's tokens at or above each pivot of its row, as multiples of the weight of `top`."""
    pivots = pivots_of(bounds)
    sums = tl.zeros((AT_PIVOTS, NUM_PIVOTS), tl.float32)
    for place in range(first, first + CHUNK, AT_PIVOTS):
        token = place + tl.arange(0, AT_PIVOTS)
        logit = tl.load(line + token.to(tl.int64) * column_stride, token < vocab_size, -INFINITY).to(tl.float32)
        sums += tl.where(logit[:, None] >= pivots[None, :], weight_of(logit, top, scale)[:, None], 0.0)
    return tl.sum(sums, 0)


@triton.jit(do_not_specialize=["vocab_size", "num_chunks", "given"])
def process(
    logits, logits_strides, vocab_size, num_chunks, given, settings, strides, ints, floats, out,
    CHUNK: tl.constexpr, LOGPROBS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program for each chunk of each row: x, or its log-softmax, of the tokens that are kept, and −inf."""
    begin(OVERLAP)
    row, chunk = tl.program_id(0) // num_chunks, tl.program_id(0) % num_chunks
    scale, _, _, _, least = settings_of(row, given, settings, strides, vocab_size)
    cut, last = tl.load(ints + row * NUM_INTS + CUT), tl.load(ints + row * NUM_INTS + LAST)
    top, total = tl.load(floats + row * NUM_FLOATS + TOP), tl.load(floats + row * NUM_FLOATS + TOTAL)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    line = logits + row.to(tl.int64) * logits_strides[0]
    x = tl.load(line + place.to(tl.int64) * logits_strides[1], place < vocab_size, -INFINITY).to(tl.float32)
    x = divided(x, scale)
    kept = is_kept(x, place, cut, last, least, top)
    if LOGPROBS:
        x = (x - top) - total
    tl.store(out + row.to(tl.int64) * vocab_size + place, tl.where(kept, x, -INFINITY), place < vocab_size)
