"""The device code of top_k_top_p_sample: find few tokens that the cuts must lie among, then cut and race those.

- `start` looks at a sample of each row and guesses a logit that a few thousand tokens reach, or k, in all likelihood.
- `read` takes the rows in chunks, each by a program of its own. It lists the tokens between two bounds, `low` and
  `high`, as candidates, adds up the weights of all, and races what reaches `high`: these tokens are certain to be kept.
- `finish` puts the chunks of a row together. It finds the cuts by search among the candidates, if sums over these show
  that the cuts lie there, and races what is kept. Where they do not, as for rows of which top-p keeps many tokens, it
  takes closer bounds, from sums of the weights above some pivots, and reads the row again. If that fails too, it
  searches the whole row: slow, and right.
- `process` writes the processed logits, if they are asked for.

Bounds are logits; what is compared with the cuts is x = logits / temperature, as integer keys in the order of the
values, searched four ways at a time. Weights are exp(x − max x), as 64-bit fixed-point numbers where the order in which
they are added is not fixed. So a row's token depends on nothing but the row.
"""

import triton
import triton.language as tl

from vllm_opset.kernels.triton._launch import begin
from vllm_opset.kernels.triton._sampling_search import (
    INFINITY,
    ITEMS,
    LOG2E,
    LOWEST_KEY,
    ONE,
    RUN,
    divided,
    exponential,
    in_fixed_point,
    is_kept,
    key_of,
    reached_at,
    search,
    token_of,
    value_of,
    weight_of,
    x_of,
)
from vllm_opset.ops.top_k_top_p_sample import GREEDY_BELOW as _GREEDY_BELOW

GREEDY_BELOW = tl.constexpr(_GREEDY_BELOW)

TEMPERATURE, TOP_K, TOP_P, MIN_P = (tl.constexpr(1 << bit) for bit in range(4))  # which settings there are

SAMPLE = tl.constexpr(4096)  # tokens of a row, at most
AMPLE = tl.constexpr(2816)  # tokens to list where the settings do not say how many
DEVIATIONS = tl.constexpr(4.0)  # by which a guess of the k-th largest from a sample stays clear of it
SMALL = tl.constexpr(8.0)  # tokens of the sample, more than those, where few make deviations meaningless
ROUGH = tl.constexpr(1 << 14)  # keys, to which a guess needs to be precise: a 512th of a value
AT_PIVOTS = tl.constexpr(512)  # compared with the pivots together
RACERS = tl.constexpr(1024)  # raced together, the words of four from one block of the generator

# Of each row: candidates listed, the key of the cut, the last index that is kept at it. Padded to a line of the cache.
LISTED, CUT, LAST = (tl.constexpr(place) for place in range(3))
NUM_INTS = tl.constexpr(32)
# Of each row: the bounds, the largest x, the logarithm of the sum of the weights that are kept, the sample's mean and
# standard deviation.
LOW, HIGH, TOP, TOTAL, MEAN, DEVIATION, NUM_FLOATS = (tl.constexpr(place) for place in range(7))
# Where the weights of a row of which top-p keeps many are added up, in standard deviations from the mean.
PIVOTS = tl.constexpr(16)
FIRST_PIVOT, BETWEEN_PIVOTS = tl.constexpr(1.5), tl.constexpr(0.2)
# Of each chunk: the largest logit, the sum of the weights, as multiples of the largest in the chunk, the best score.
CHUNK_TOP, CHUNK_TOTAL, CHUNK_SCORE, NUM_PARTS = (tl.constexpr(place) for place in range(4))


@triton.jit(do_not_specialize=["vocab_size", "given", "processed"])
def start(
    logits, logits_strides, vocab_size, given, settings, strides, processed, ints, floats,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a row: its first bounds."""
    begin(OVERLAP)
    row = tl.program_id(0)
    _, greedy, k, p, least = _settings(row, given, settings, strides, vocab_size)
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


@triton.jit
def _settings(row, given, settings, strides, vocab_size):
    """Of a row: its divisor, whether it is greedy, k or 0, p or 1, and min-p or 0. `given`: a bit for each setting."""
    temperature = tl.load(settings[0] + row * strides[0], (given & TEMPERATURE) != 0, 1.0)
    k = tl.load(settings[1] + row * strides[1], (given & TOP_K) != 0, 0).to(tl.int32)
    p = tl.load(settings[2] + row * strides[2], (given & TOP_P) != 0, 1.0)
    least = tl.load(settings[3] + row * strides[3], (given & MIN_P) != 0, 0.0)
    greedy = temperature < GREEDY_BELOW
    return tl.where(greedy, 1.0, temperature), greedy, tl.where(k < vocab_size, k, 0), p, least


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
    scale, greedy, k, _, _ = _settings(row, given, settings, strides, vocab_size)
    seed = tl.load(keys + row * strides[4])
    number = row * num_chunks + chunk
    part = parts + number * NUM_PARTS
    top = tl.max(logit, 0)
    tl.store(part + CHUNK_TOP, top)
    if FILTERED and low < INFINITY:
        among = (logit >= low) & (logit > -INFINITY)
        _list(logit, place, among, ints + row * NUM_INTS + LISTED, listed_logits, listed_ids, row, capacity)
    if k == 0 and (processed != 0 or (FILTERED and not greedy)):
        weight = weight_of(logit, top, scale)
        tl.store(part + CHUNK_TOTAL, tl.sum(weight, 0))
    score, winner = -INFINITY, vocab_size
    if greedy:
        score, winner = top, tl.min(tl.where(logit == top, place, vocab_size), 0)
    elif top >= high:
        best, racer = _nobody(vocab_size, RACERS)
        best, racer = _race(
            best, racer, line, logits_strides[1], chunk * CHUNK, high, top, scale, seed, vocab_size, CHUNK
        )
        score, winner = _first_of_best(best, racer, vocab_size)
    tl.store(part + CHUNK_SCORE, score)
    tl.store(part_ids + number, winner)


@triton.jit
def _list(logit, place, among, listed, listed_logits, listed_ids, row, capacity):
    """Writes candidates, in any order, as far as there is room. They are too few for a scan to be cheaper."""
    slot = tl.atomic_add(listed + tl.zeros_like(place), 1, among, sem="relaxed")
    first = row.to(tl.int64) * capacity
    tl.store(listed_logits + first + slot, logit, among & (slot < capacity))
    tl.store(listed_ids + first + slot, place, among & (slot < capacity))


@triton.jit
def _race(best, winner, line, column_stride, first, high, top, scale, seed, vocab_size, CHUNK: tl.constexpr):
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
def _nobody(vocab_size, COUNT: tl.constexpr):
    return tl.full((COUNT,), -1.0, tl.float32), tl.full((COUNT,), 0, tl.int32) + vocab_size


@triton.jit
def _first_of_best(scores, tokens, vocab_size):
    score = tl.max(scores, 0)
    return score, tl.min(tl.where(scores == score, tokens, vocab_size), 0)


@triton.jit(do_not_specialize=["vocab_size", "num_chunks", "given", "processed", "capacity"])
def finish(
    logits, logits_strides, vocab_size, num_chunks, keys, tokens, given, settings, strides, processed,
    ints, floats, parts, part_ids, listed_logits, listed_ids, capacity,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, FILTERED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a row: its token."""
    begin(OVERLAP)
    row = tl.program_id(0)
    scale, greedy, k, p, least = _settings(row, given, settings, strides, vocab_size)
    seed = tl.load(keys + row * strides[4])
    line, column_stride = logits + row.to(tl.int64) * logits_strides[0], logits_strides[1]
    parts += row * num_chunks * NUM_PARTS
    chunk = tl.arange(0, CHUNKS)
    tops = tl.load(parts + chunk * NUM_PARTS + CHUNK_TOP, chunk < num_chunks, -INFINITY)
    scores = tl.load(parts + chunk * NUM_PARTS + CHUNK_SCORE, chunk < num_chunks, -INFINITY)
    winners = tl.load(part_ids + row * num_chunks + chunk, chunk < num_chunks, vocab_size)
    top_logit = tl.max(tops, 0)
    share = weight_of(tops, top_logit, scale)
    if not greedy:
        scores *= share
    score, winner = _first_of_best(scores, winners, vocab_size)
    total, certain = 0.0, 0.0
    if k == 0 and (processed != 0 or (FILTERED and not greedy)):
        totals = tl.load(parts + chunk * NUM_PARTS + CHUNK_TOTAL, chunk < num_chunks, 0.0)
        total = tl.sum(totals * share, 0)
    top = divided(top_logit, scale)

    cut, last, kept = LOWEST_KEY, vocab_size, total
    if FILTERED and ((k > 0 or p < 1 or least > 0) and (processed != 0 or not greedy)):
        low, high = tl.load(floats + row * NUM_FLOATS + LOW), INFINITY
        number, run = tl.load(ints + row * NUM_INTS + LISTED), RUN
        row_logits, row_ids = listed_logits + row.to(tl.int64) * capacity, listed_ids + row.to(tl.int64) * capacity
        lowest, highest, goal, listed = _check(
            k, p, least, low, high, top, total, certain,
            line, row_logits, row_ids, column_stride, number, capacity, scale,
        )  # fmt: skip
        if not listed and (k == 0 and (p == 1 or least == 0)):
            low, high = _narrow(
                floats + row * NUM_FLOATS, p * total, low, least, top, scale, line, column_stride, vocab_size
            )
            number, certain, score, winner = _read_again(
                ints + row * NUM_INTS, line, column_stride, vocab_size, num_chunks, seed, scale, greedy, low, high,
                top_logit, score, winner, listed_logits, listed_ids, row, capacity, CHUNK,
            )  # fmt: skip
            lowest, highest, goal, listed = _check(
                k, p, least, low, high, top, total, certain,
                line, row_logits, row_ids, column_stride, number, capacity, scale,
            )  # fmt: skip
        if not listed:
            lowest, highest, number, certain = LOWEST_KEY, key_of(top), vocab_size, 0.0
            goal = tl.ceil(p * total * ONE).to(tl.int64)
        cut, last, kept, score, winner = _cut_and_race(
            k, p, least, lowest, highest, goal, certain, top, score, winner, seed, greedy, vocab_size,
            line, row_logits, row_ids, column_stride, number, run, listed, scale,
        )  # fmt: skip
    # A row without a finite logit, or with NaN, gets some token.
    tl.store(tokens + row, tl.where(winner < vocab_size, winner, 0).to(tl.int64))
    tl.store(ints + row * NUM_INTS + CUT, cut)
    tl.store(ints + row * NUM_INTS + LAST, last)
    tl.store(floats + row * NUM_FLOATS + TOP, top)
    tl.store(floats + row * NUM_FLOATS + TOTAL, tl.log(kept))


@triton.jit
def _read_again(
    ints, line, column_stride, vocab_size, num_chunks, seed, scale, greedy, low, high, top, score, winner,
    listed_logits, listed_ids, row, capacity, CHUNK: tl.constexpr,
):  # fmt: skip
    """What `read` does, for a whole row: the number of candidates, and the certain tokens' weight, score and winner."""
    certain = tl.zeros((CHUNK,), tl.float32)
    best, racer = _nobody(vocab_size, RACERS)
    listed = ints + LISTED
    tl.store(listed, 0)
    tl.debug_barrier()
    for chunk in range(0, num_chunks):
        place = chunk * CHUNK + tl.arange(0, CHUNK)
        logit = tl.load(line + place.to(tl.int64) * column_stride, place < vocab_size, -INFINITY).to(tl.float32)
        among = (logit >= low) & (logit < high) & (logit > -INFINITY)
        _list(logit, place, among, listed, listed_logits, listed_ids, row, capacity)
        certain += tl.where(logit >= high, weight_of(logit, top, scale), 0.0)
        if not greedy:
            best, racer = _race(
                best, racer, line, column_stride, chunk * CHUNK, high, top, scale, seed, vocab_size, CHUNK
            )
    if not greedy:
        score, winner = _first_of_best(best, racer, vocab_size)
    tl.debug_barrier()  # what all threads have listed is there
    return tl.load(listed, volatile=True), tl.sum(certain, 0), score, winner


@triton.jit
def _check(
    k, p, least, low, high, top, total, certain,
    line, listed_logits, listed_ids, column_stride, number, capacity, scale,
):  # fmt: skip
    """The keys among which the cuts must lie, what top-p alone wants of the candidates, and whether it is all there.

    Bounds themselves are left out: other logits may have the same x.
    """
    lowest, highest = LOWEST_KEY, key_of(top)
    if low > -INFINITY:
        lowest = key_of(divided(low, scale)) + 1
    if high < INFINITY:
        highest = key_of(divided(high, scale)) - 1
    goal = tl.ceil((p * total - certain) * ONE).to(tl.int64)
    complete = number <= capacity
    reached = reached_at(
        lowest, highest + 1, highest + 1, False, k > 0, LOWEST_KEY, 0.0, top,
        line, listed_logits, listed_ids, column_stride, tl.where(complete, number, 0), RUN, True, scale,
    )  # fmt: skip
    most, fewest = tl.max(reached, 0), tl.min(reached, 0)
    if k > 0:
        enough, few = most >= k, True
    elif least > 0:
        enough, few = False, tl.exp2((divided(high, scale) - top) * LOG2E) >= least
    else:
        enough, few = most >= goal, fewest < goal
    enough = enough or low == -INFINITY or tl.exp2((divided(low, scale) - top) * LOG2E) < least
    return lowest, highest, goal, complete and enough and (few or high == INFINITY)


@triton.jit
def _cut_and_race(
    k, p, least, lowest, highest, goal, certain, top, score, winner, seed, greedy, vocab_size,
    line, listed_logits, listed_ids, column_stride, number, run, listed, scale,
):  # fmt: skip
    """The cut, the last index that is kept at it, the sum of the weights that are kept, and the winner of the race."""
    floor, last = LOWEST_KEY, vocab_size
    if k > 0:
        floor = search(
            False, True, k.to(tl.int64), lowest, highest, 0, LOWEST_KEY, 0.0, top,
            line, listed_logits, listed_ids, column_stride, number, run, listed, scale,
        )  # fmt: skip
    cut = floor
    if p < 1:
        if k > 0 or least > 0:
            reached = reached_at(
                LOWEST_KEY, LOWEST_KEY, LOWEST_KEY, False, False, floor, least, top,
                line, listed_logits, listed_ids, column_stride, number, run, listed, scale,
            )  # fmt: skip
            goal = tl.ceil(p * tl.max(reached, 0).to(tl.float32)).to(tl.int64)
        cut = search(
            False, False, goal, max(lowest, floor), highest, 0, floor, least, top,
            line, listed_logits, listed_ids, column_stride, number, run, listed, scale,
        )  # fmt: skip
        reached = reached_at(
            cut, cut + 1, cut + 1, False, False, floor, least, top,
            line, listed_logits, listed_ids, column_stride, number, run, listed, scale,
        )  # fmt: skip
        most, above = tl.max(reached, 0), tl.min(reached, 0)
        each = max(in_fixed_point(tl.exp2((value_of(cut) - top) * LOG2E)), 1)
        equal = (most - above + each // 2) // each
        wanted = max((goal - above + each - 1) // each, 1)
        if wanted < equal:
            last = -1 - search(
                True, True, wanted, -vocab_size, -1, 0, cut, 0.0, top,
                line, listed_logits, listed_ids, column_stride, number, run, listed, scale,
            )  # fmt: skip

    best, best_id = _nobody(vocab_size, ITEMS)
    kept = tl.full((), 0, tl.int64)
    for first in range(0, number, ITEMS):
        item = first + tl.arange(0, ITEMS)
        x = x_of(item, line, listed_logits, column_stride, number, run, listed, scale)
        token = token_of(item, listed_ids, number, run, listed)
        weight = tl.where(is_kept(x, token, cut, last, least, top), tl.exp2((x - top) * LOG2E), 0.0)
        kept += tl.sum(in_fixed_point(weight), 0)
        if not greedy:
            words = tl.randint4x(seed, token // 4)
            lane = token % 4
            word = tl.where(lane < 2, tl.where(lane == 0, words[0], words[1]), tl.where(lane == 2, words[2], words[3]))
            mine = tl.where(weight > 0, weight / exponential(word), -1.0)
            better = (mine > best) | ((mine == best) & (token < best_id))
            best, best_id = tl.where(better, mine, best), tl.where(better, token, best_id)
    if not greedy:
        highest_score, first_best = _first_of_best(best, best_id, vocab_size)
        if certain == 0 or highest_score > score or (highest_score == score and first_best < winner):
            score, winner = highest_score, first_best
    return cut, last, certain + kept.to(tl.float32) / ONE, score, winner


@triton.jit
def _narrow(bounds, wanted, low, least, top, scale, line, column_stride, vocab_size):
    """Closer bounds for a row of which too little was listed, with top-p alone or with min-p alone."""
    closer, high = -INFINITY, low
    if least > 0:  # where min-p cuts is known by now
        low = (top + tl.log(least)) * scale
        margin = (tl.abs(low) + tl.abs(top * scale)) * 1e-5 + 1e-30
        closer, high = low - margin, low + margin
    else:
        mean, deviation = tl.load(bounds + MEAN), tl.load(bounds + DEVIATION)
        pivot = tl.arange(0, PIVOTS)
        value = mean + deviation * (FIRST_PIVOT - pivot * BETWEEN_PIVOTS)
        above = tl.zeros((AT_PIVOTS, PIVOTS), tl.float32)
        for first in range(0, vocab_size, AT_PIVOTS):
            x = x_of(first + tl.arange(0, AT_PIVOTS), line, line, column_stride, vocab_size, RUN, False, 1.0)
            weight = weight_of(x, top * scale, scale)
            above += tl.where(x[:, None] >= value[None, :], weight[:, None], 0.0)
        sums = tl.sum(above, 0)
        closer = tl.max(tl.where(sums >= wanted, value, -INFINITY), 0)
        high = min(low, tl.min(tl.where(sums >= wanted, INFINITY, value), 0))
    return closer, high


@triton.jit
def _sample(vocab_size):
    """How many tokens of a row are looked at to guess, and how far apart runs of them start."""
    sampled, run = vocab_size, RUN
    if vocab_size > SAMPLE:
        sampled, run = SAMPLE, vocab_size // (SAMPLE // RUN) // RUN * RUN
    return sampled, run


@triton.jit(do_not_specialize=["vocab_size", "num_chunks", "given"])
def process(
    logits, logits_strides, vocab_size, num_chunks, given, settings, strides, ints, floats, out,
    CHUNK: tl.constexpr, LOGPROBS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program for each chunk of each row: x, or its log-softmax, of the tokens that are kept, and −inf."""
    begin(OVERLAP)
    row, chunk = tl.program_id(0) // num_chunks, tl.program_id(0) % num_chunks
    scale, _, _, _, least = _settings(row, given, settings, strides, vocab_size)
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
