"""The device code of top_k_top_p_sample: find a few tokens that must include the cut-offs, filter them, sample one.

A token is sampled by an exponential argmax (the Gumbel-max trick): it has the largest weight / E of all kept tokens,
where E is exponential noise of each token. So an argmax over chunks, and then over their results, samples a row.

- `start` looks at a sample of each row. It estimates a logit that very likely a few thousand tokens reach, or k tokens.

- `read` processes the rows in chunks, one program per chunk. It lists the tokens between two bounds, `low` and `high`,
  as candidates, and sums the weights of all tokens. It samples among the tokens that reach `high`, because they are
  certain to be kept.

- `reread` does the same with closer bounds for rows whose candidates miss the cut-off, for example because top-p keeps
  many tokens. `start` estimates from the sample which rows these are. For them, `read` sums the weights above some
  pivots, and the closer bounds lie between two pivots.

- `finish` combines the chunks of a row. If sums over the candidates show that they include the cut-offs, it searches
  the candidates for the cut-offs and samples among the kept tokens. Otherwise it searches the whole row, which is slow.

- `process` writes the processed logits, if the call asks for them.

If the call asks only for tokens and the sample shows that top-p keeps many, `start` chooses rejection, with one bound
below the cut-off and one above it. `read` samples among the tokens above both, which are certain to be kept. Of the
tokens between the bounds, it lists only rivals. The score of a rival exceeds that of some certain token. A row has few,
and mostly none that beats the sampled token. `finish` takes the best rival that top-p keeps, if one beats it. No
other token can be the result, so the cut-off itself is not needed.

`reread` and `finish` are in files of the same names. `_rows` holds the code that the kernels share, `_noise` the noise,
`_search` the search and the operations on values.

Bounds are logits. The cut-offs apply to x = logits / temperature, as integer keys in the order of the values, and each
step of a search divides the range in four. Weights are exp(x − max x). They are 64-bit fixed-point numbers where the
order of summation is not fixed. So the token of a row depends only on the row.
"""

import triton
import triton.language as tl

from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton.top_k_top_p_sample._noise import WORDS, noise_of_block
from vllm_opset.kernels.triton.top_k_top_p_sample._rows import (
    ABOVE,
    BELOW,
    CHUNK_CERTAIN,
    CHUNK_LISTED,
    CHUNK_MAX,
    CHUNK_SCORE,
    CHUNK_TOTAL,
    CLOSER_LOW,
    CUT,
    DEVIATION,
    ESTIMATE,
    HIGH,
    LAST,
    LEAST_SCORE,
    LISTED,
    LOW,
    MAX_X,
    NUM_FLOATS,
    NUM_INTS,
    NUM_PARTS,
    NUM_PIVOTS,
    REFERENCE,
    REJECTION,
    RELISTED,
    STRATEGY,
    TOTAL,
    USE_LIST,
    chunk_argmax,
    least_score_of,
    list_candidates,
    pivots_of,
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

SAMPLE = tl.constexpr(4096)  # the most tokens of a row in its sample
DEVIATIONS = tl.constexpr(4.0)  # margin of estimates from the sample, in standard deviations
SAMPLE_MARGIN = tl.constexpr(8.0)  # more tokens of the sample, because deviations mean little for few tokens
ESTIMATE_PRECISION = tl.constexpr(1 << 14)  # the precision of an estimate, in keys: a 512th of a value
# The sample lacks the largest tokens of a row, so it shows too small a share of the weight above a bound. The cut-off
# is estimated only if this share is below top-p by more than this.
UNSEEN_SHARE = tl.constexpr(0.1)
LEAST_CERTAIN = tl.constexpr(0.25)  # the share of top-p that the tokens above the upper bound have at least
# Scores of a token differ in their last bits, by how they are computed.
SCORE_MARGIN = tl.constexpr(1 - 1e-3)
LOWEST_PIVOT, LEAST_REACH = tl.constexpr(-1.5), tl.constexpr(0.5)  # in standard deviations of the sample
PIVOT_BLOCK = tl.constexpr(128)  # tokens that are compared with the pivots together


@triton.jit(do_not_specialize=["vocab_size", "given", "processed"])
def start(
    logits, logits_strides, vocab_size, keys, given, settings, strides, processed, ints, floats,
    LIST_LENGTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes the first bounds of a row, one program per row. LIST_LENGTH: tokens to list if there is no top-k."""
    pdl_wait(PDL)
    row = tl.program_id(0)
    scale, greedy, k, p, least = settings_of(row, given, settings, strides, vocab_size)
    strategy, low, high, estimate = USE_LIST, INFINITY, -INFINITY, INFINITY
    if greedy and processed == 0:
        high = INFINITY
    elif k > 0 or p < 1 or least > 0:
        high = INFINITY
        sample_size, run = _sample(vocab_size)
        wanted = sample_size * (LIST_LENGTH / vocab_size)
        if k > 0:
            mean = k * (sample_size / vocab_size)
            wanted = mean + DEVIATIONS * tl.sqrt(mean) + SAMPLE_MARGIN
        line = logits + row.to(tl.int64) * logits_strides[0]
        x = x_of(tl.arange(0, SAMPLE), line, line, logits_strides[1], sample_size, run, False, 1.0)
        low = _reached_by(x, tl.full(x.shape, 1.0, tl.float32), wanted)
        finite = x > -INFINITY
        number = tl.sum(finite.to(tl.float32), 0)
        mean = tl.sum(tl.where(finite, x, 0.0), 0) / number
        deviation = tl.sqrt(tl.sum(tl.where(finite, (x - mean) * (x - mean), 0.0), 0) / number)
        tl.store(floats + row * NUM_FLOATS + DEVIATION, deviation)
        if k == 0 and (p < 1 and least == 0):
            top = tl.max(x, 0)
            weight = weight_of(x, top, scale)
            total = tl.sum(weight, 0)
            wide = tl.sum(tl.where(x >= low, weight, 0.0), 0) < (p - UNSEEN_SHARE) * total
            if processed == 0:
                certain = low
                if wide:
                    strategy = REJECTION
                    tl.store(floats + row * NUM_FLOATS + CLOSER_LOW, low)
                    low, high = _rejection_bounds(x, weight, total, p)
                    certain = high
                seed = tl.load(keys + row * strides[4])
                noise = noise_of_block(seed, _sampled_token(tl.arange(0, SAMPLE // WORDS) * WORDS, run) // WORDS)
                least_score = tl.max(tl.where(x >= certain, weight, 0.0) / noise, 0) * SCORE_MARGIN
                tl.store(floats + row * NUM_FLOATS + REFERENCE, top)
                tl.store(floats + row * NUM_FLOATS + LEAST_SCORE, least_score)
            elif wide:
                estimate = _reached_by(x, weight, p * total)
                below = max(estimate - (mean + LOWEST_PIVOT * deviation), LEAST_REACH * deviation)
                tl.store(floats + row * NUM_FLOATS + ABOVE, low - estimate)
                tl.store(floats + row * NUM_FLOATS + BELOW, below)
    tl.store(floats + row * NUM_FLOATS + LOW, low)
    tl.store(floats + row * NUM_FLOATS + HIGH, high)
    tl.store(floats + row * NUM_FLOATS + ESTIMATE, estimate)
    tl.store(ints + row * NUM_INTS + LISTED, 0)
    tl.store(ints + row * NUM_INTS + RELISTED, 0)
    tl.store(ints + row * NUM_INTS + STRATEGY, strategy)


@triton.jit
def _sample(vocab_size):
    """The number of tokens in the sample of a row, and the distance between the starts of their runs."""
    sample_size, run = vocab_size, RUN
    if vocab_size > SAMPLE:
        sample_size, run = SAMPLE, vocab_size // (SAMPLE // RUN) // RUN * RUN
    return sample_size, run


@triton.jit
def _sampled_token(item, run):
    return item // RUN * run + item % RUN


@triton.jit
def _rejection_bounds(x, weight, total, p):
    """Two logits that are very likely not above and not below top-p's cut-off, from the weights of a sample."""
    error = DEVIATIONS * max(p, 1 - p) * tl.sqrt(tl.sum(weight * weight, 0)) / total
    low = -INFINITY
    if p + error < 1:
        low = _reached_by(x, weight, (p + error) * total)
    return low, _reached_by(x, weight, max(p - error, LEAST_CERTAIN * p) * total)


@triton.jit
def _reached_by(x, amount, wanted):
    """The largest value, roughly, such that the amounts at or above it sum to `wanted`; −inf if all sum to less."""
    key = key_of(x)
    zero = tl.full((), 0, tl.int64)
    first, last = zero + LOWEST_KEY, zero + tl.max(key, 0)
    while last - first > ESTIMATE_PRECISION:
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
def _add_three(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit(do_not_specialize=["num_chunks", "given", "processed", "capacity"])
def read(
    logits, logits_strides, vocab_size, num_chunks, keys, given, settings, strides, processed,
    ints, floats, parts, part_ids, pivot_sums, listed_logits, listed_ids, capacity,
    CHUNK: tl.constexpr, FILTERED: tl.constexpr, REREAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Lists candidates, sums weights, and samples among certain tokens, with one program per chunk of each row.

    FILTERED: whether the call gives a filter, so that `start` is the previous kernel. REREAD: whether `reread` follows.

    Programs that run at the same time take different rows if possible, because the counter of a row is a bottleneck.
    """
    if not FILTERED:
        pdl_wait(PDL)
    num_rows = tl.num_programs(0) // num_chunks
    row, chunk = tl.program_id(0) % num_rows, tl.program_id(0) // num_rows
    line = logits + row.to(tl.int64) * logits_strides[0]
    # All loads come before the first branch, so that they wait for memory together. `start` has waited for whatever
    # wrote the arguments, so they can be loaded while it ends.
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(line + place.to(tl.int64) * logits_strides[1], place < vocab_size, -INFINITY).to(tl.float32)
    scale, greedy, k, _, _ = settings_of(row, given, settings, strides, vocab_size)
    seed = tl.load(keys + row * strides[4])
    top = tl.max(logit, 0)
    low, high, strategy = INFINITY, -INFINITY, USE_LIST
    if FILTERED:
        pdl_wait(PDL)
        low, high = tl.load(floats + row * NUM_FLOATS + LOW), tl.load(floats + row * NUM_FLOATS + HIGH)
    if REREAD:
        strategy = tl.load(ints + row * NUM_INTS + STRATEGY)
    number = row * num_chunks + chunk
    part = parts + number * NUM_PARTS
    tl.store(part + CHUNK_MAX, top)
    if k == 0 and (processed != 0 or (REREAD and not greedy)):
        weight = weight_of(logit, top, scale)
        if REREAD:
            total, listed, certain = tl.reduce(
                (weight, tl.where(logit >= min(low, high), weight, 0.0), tl.where(logit >= high, weight, 0.0)),
                0,
                _add_three,
            )
            tl.store(part + CHUNK_LISTED, listed)
            tl.store(part + CHUNK_CERTAIN, certain)
        else:
            total = tl.sum(weight, 0)
        tl.store(part + CHUNK_TOTAL, total)
        if REREAD and processed != 0:  # noqa: SIM102  REREAD is known at compile time
            if tl.load(floats + row * NUM_FLOATS + ESTIMATE) < INFINITY:
                sums = _sums_at_pivots(
                    floats + row * NUM_FLOATS, line, logits_strides[1], chunk * CHUNK, top, scale, vocab_size, CHUNK
                )
                tl.store(pivot_sums + number * NUM_PIVOTS + tl.arange(0, NUM_PIVOTS), sums)
    score, sampled, least_score, least = 0.0, vocab_size, 0.0, high
    if greedy:
        score, sampled = top, tl.min(tl.where(logit == top, place, vocab_size), 0)
    if FILTERED and (low < INFINITY and strategy != REJECTION):
        list_candidates(
            logit, place, (logit >= low) & (logit > -INFINITY), ints + row * NUM_INTS + LISTED,
            listed_logits, listed_ids, row, capacity, True,
        )  # fmt: skip
    if REREAD and (strategy == REJECTION):
        least = low
        least_score = least_score_of(floats + row * NUM_FLOATS, top, scale)
    if not greedy and top >= least:
        score, sampled = chunk_argmax(
            line, logits_strides[1], chunk * CHUNK, low, high, least_score, top, scale, seed, vocab_size,
            ints + row * NUM_INTS + LISTED, listed_logits, listed_ids, row, capacity, REREAD, CHUNK,
        )  # fmt: skip
    tl.store(part + CHUNK_SCORE, score)
    tl.store(part_ids + number, sampled)


@triton.jit
def _sums_at_pivots(bounds, line, column_stride, first, top, scale, vocab_size, CHUNK: tl.constexpr):
    """The weights of a chunk's tokens at or above each pivot of its row, as multiples of the weight of `top`."""
    pivots = pivots_of(bounds)
    sums = tl.zeros((PIVOT_BLOCK, NUM_PIVOTS), tl.float32)
    for place in range(first, first + CHUNK, PIVOT_BLOCK):
        token = place + tl.arange(0, PIVOT_BLOCK)
        logit = tl.load(line + token.to(tl.int64) * column_stride, token < vocab_size, -INFINITY).to(tl.float32)
        sums += tl.where(logit[:, None] >= pivots[None, :], weight_of(logit, top, scale)[:, None], 0.0)
    return tl.sum(sums, 0)


@triton.jit(do_not_specialize=["vocab_size", "num_chunks", "given"])
def process(
    logits, logits_strides, vocab_size, num_chunks, given, settings, strides, ints, floats, out,
    CHUNK: tl.constexpr, LOGPROBS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes x or its log-softmax for kept tokens and −inf for others, with one program per chunk of each row."""
    pdl_wait(PDL)
    row, chunk = tl.program_id(0) // num_chunks, tl.program_id(0) % num_chunks
    scale, _, _, _, least = settings_of(row, given, settings, strides, vocab_size)
    cut, last = tl.load(ints + row * NUM_INTS + CUT), tl.load(ints + row * NUM_INTS + LAST)
    top, total = tl.load(floats + row * NUM_FLOATS + MAX_X), tl.load(floats + row * NUM_FLOATS + TOTAL)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    line = logits + row.to(tl.int64) * logits_strides[0]
    x = tl.load(line + place.to(tl.int64) * logits_strides[1], place < vocab_size, -INFINITY).to(tl.float32)
    x = divided(x, scale)
    kept = is_kept(x, place, cut, last, least, top)
    if LOGPROBS:
        x = (x - top) - total
    tl.store(out + row.to(tl.int64) * vocab_size + place, tl.where(kept, x, -INFINITY), place < vocab_size)
