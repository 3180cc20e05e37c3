"""The device code of top_k_top_p_sample: find few tokens that the cuts must lie among, then cut and race those.

- `start` looks at a sample of each row and guesses a logit that a few thousand tokens reach, or k, in all likelihood.
- `read` takes the rows in chunks, each by a program of its own. It lists the tokens between two bounds, `low` and
  `high`, as candidates, adds up the weights of all, and races what reaches `high`: these tokens are certain to be kept.
- `finish` puts the chunks of a row together. It finds the cuts by search among the candidates, if sums over these show
  that the cuts lie there, and races what is kept. Where they do not, as for rows of which top-p keeps many tokens, it
  takes closer bounds, from sums of the weights above some pivots, and reads the row again. If that fails too, it
  searches the whole row: slow, and right.
- `process` writes the processed logits, if they are asked for.

`finish` is in `_sampling_finish.py`, what it shares with the others in `_sampling_rows.py`, and the search, with what
is done to a value, in `_sampling_search.py`.

Bounds are logits; what is compared with the cuts is x = logits / temperature, as integer keys in the order of the
values, searched four ways at a time. Weights are exp(x − max x), as 64-bit fixed-point numbers where the order in which
they are added is not fixed. So a row's token depends on nothing but the row.
"""

import triton
import triton.language as tl

from vllm_opset.kernels.triton._launch import begin
from vllm_opset.kernels.triton._sampling_rows import (
    CHUNK_SCORE,
    CHUNK_TOP,
    CHUNK_TOTAL,
    CUT,
    DEVIATION,
    HIGH,
    LAST,
    LISTED,
    LOW,
    MEAN,
    NUM_FLOATS,
    NUM_INTS,
    NUM_PARTS,
    RACERS,
    TOP,
    TOTAL,
    first_of_best,
    list_candidates,
    nobody,
    race,
    settings_of,
)
from vllm_opset.kernels.triton._sampling_search import (
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


@triton.jit(do_not_specialize=["vocab_size", "given", "processed"])
def start(
    logits, logits_strides, vocab_size, given, settings, strides, processed, ints, floats,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a row: its first bounds."""
    begin(OVERLAP)
    row = tl.program_id(0)
    _, greedy, k, p, least = settings_of(row, given, settings, strides, vocab_size)
    low, high = INFINITY, -INFINITY
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
        low = _reached_by(x, wanted)
        finite = x > -INFINITY
        number = tl.sum(finite.to(tl.float32), 0)
        mean = tl.sum(tl.where(finite, x, 0.0), 0) / number
        variance = tl.sum(tl.where(finite, (x - mean) * (x - mean), 0.0), 0) / number
        tl.store(floats + row * NUM_FLOATS + MEAN, mean)
        tl.store(floats + row * NUM_FLOATS + DEVIATION, tl.sqrt(variance))
    tl.store(floats + row * NUM_FLOATS + LOW, low)
    tl.store(floats + row * NUM_FLOATS + HIGH, high)
    tl.store(ints + row * NUM_INTS + LISTED, 0)


@triton.jit
def _sample(vocab_size):
    """How many tokens of a row are looked at to guess, and how far apart runs of them start."""
    sampled, run = vocab_size, RUN
    if vocab_size > SAMPLE:
        sampled, run = SAMPLE, vocab_size // (SAMPLE // RUN) // RUN * RUN
    return sampled, run


@triton.jit
def _reached_by(x, wanted):
    """A value that so many of a sample reach, roughly; −inf if there are fewer."""
    key = key_of(x)
    zero = tl.full((), 0, tl.int64)
    first, last = zero + LOWEST_KEY, zero + tl.max(key, 0)
    while last - first > ROUGH:
        middle = (first + last + 1) // 2
        if tl.sum((key >= middle.to(tl.int32)).to(tl.float32), 0) >= wanted:
            first = middle
        else:
            last = middle - 1
    return value_of(first.to(tl.int32))


@triton.jit(do_not_specialize=["vocab_size", "num_chunks", "given", "processed", "capacity"])
def read(
    logits, logits_strides, vocab_size, num_chunks, keys, given, settings, strides, processed,
    ints, floats, parts, part_ids, listed_logits, listed_ids, capacity,
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
        tl.store(part + CHUNK_TOTAL, tl.sum(weight, 0))
    score, winner = -INFINITY, vocab_size
    if greedy:
        score, winner = top, tl.min(tl.where(logit == top, place, vocab_size), 0)
    elif top >= high:
        best, racer = nobody(vocab_size, RACERS)
        best, racer = race(
            best, racer, line, logits_strides[1], chunk * CHUNK, high, top, scale, seed, vocab_size, CHUNK
        )
        score, winner = first_of_best(best, racer, vocab_size)
    tl.store(part + CHUNK_SCORE, score)
    tl.store(part_ids + number, winner)


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
