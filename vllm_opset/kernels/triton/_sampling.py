"""The device code of top_k_top_p_sample: find few tokens that the cuts must lie among, then cut and race those.

A row is read in chunks, each by a program of its own; the last program of a row to finish puts them together.

- `start` looks at a sample of the row and guesses a logit that a few thousand tokens reach, or k, in all likelihood.
- `draw` lists the tokens between two bounds, `low` and `high`, as candidates, adds up the weights of all, and races
  what reaches `high`: these tokens are certain to be kept. Then it finds the cuts by search among the candidates, if
  sums over these show that the cuts lie there, and races what is kept.
- Rows that this leaves open, such as those where top-p keeps many tokens, get closer bounds, from sums of the weights
  above some pivots, and go through `draw` once more. If that fails too, the search is over the whole row: slow, and
  right.
- `process` writes the processed logits, if they are asked for.

Bounds are logits; what is compared with the cuts is x = logits / temperature, as integer keys in the order of the
values, searched four ways at a time. Weights are exp(x − max x), as 64-bit fixed-point numbers where the order in which
they are added is not fixed. So a row's token depends on nothing but the row.
"""

import triton
import triton.language as tl

from vllm_opset.kernels.triton._launch import begin
from vllm_opset.ops import philox
from vllm_opset.ops.top_k_top_p_sample import GREEDY_BELOW as _GREEDY_BELOW

GREEDY_BELOW = tl.constexpr(_GREEDY_BELOW)
LARGEST_UNIFORM = tl.constexpr(philox.LARGEST_UNIFORM)
LOG2E = tl.constexpr(1.4426950408889634)
INFINITY = tl.constexpr(float("inf"))

TEMPERATURE, TOP_K, TOP_P, MIN_P = (tl.constexpr(1 << bit) for bit in range(4))  # which settings there are

LOWEST_KEY = tl.constexpr(-2139095041)  # of −inf
HIGHEST_KEY = tl.constexpr(2139095040)  # of inf
ONE = tl.constexpr(
    2.0**40
)  # in fixed point: 2²² tokens of weight one fit, and what is lost is below 1e-12 of the largest

SAMPLE = tl.constexpr(4096)  # tokens of a row, at most
RUN = tl.constexpr(8)  # neighbours that are sampled together: 32 bytes of fp32
AMPLE = tl.constexpr(2816)  # tokens to list where the settings do not say how many
DEVIATIONS = tl.constexpr(4.0)  # by which a guess of the k-th largest from a sample stays clear of it
SMALL = tl.constexpr(8.0)  # tokens of the sample, more than those, where few make deviations meaningless
ROUGH = tl.constexpr(1 << 14)  # keys, to which a guess needs to be precise: a 512th of a value
ITEMS = tl.constexpr(1024)  # looked at together in a search

# Of each row: tickets, candidates listed, whether the token is drawn, key of the cut, last index of those at the cut.
TICKETS, LISTED, DRAWN, CUT, LAST, NUM_INTS = (tl.constexpr(place) for place in range(6))
# Of each row: the bounds, the largest x, the logarithm of the sum of the weights that are kept, the sample's mean and
# standard deviation.
LOW, HIGH, TOP, TOTAL, MEAN, DEVIATION, NUM_FLOATS = (tl.constexpr(place) for place in range(7))
# Where the weights of a row are added up on the way, in standard deviations from the mean: of normally distributed
# logits, a thirteenth lies between each two.
PIVOTS = tl.constexpr((1.426, 1.020, 0.736, 0.502, 0.293, 0.097, -0.097, -0.293, -0.502, -0.736, -1.020, -1.426))
# Of each chunk: the largest logit, the sum of all weights, that of the certain tokens' (as multiples of the largest in
# the chunk), the best score of these, and the sums of the weights above the pivots.
CHUNK_TOP, CHUNK_TOTAL, CHUNK_CERTAIN, CHUNK_SCORE, CHUNK_PIVOTS = (tl.constexpr(place) for place in range(5))
NUM_PIVOTS = tl.constexpr(len(PIVOTS.value))
NUM_PARTS = tl.constexpr(CHUNK_PIVOTS.value + NUM_PIVOTS.value)


@triton.jit(do_not_specialize=["vocab_size", "given"])
def start(
    logits, logits_strides, vocab_size, given, settings, strides, ints, floats,
    PROCESSED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a row: its first bounds."""
    begin(OVERLAP)
    row = tl.program_id(0)
    _, greedy, k, p, least = _settings(row, given, settings, strides, vocab_size)
    low, high = INFINITY, -INFINITY
    if greedy and not PROCESSED:
        high = INFINITY
    elif k > 0 or p < 1 or least > 0:
        high = INFINITY
        sampled, run = _sample(vocab_size)
        wanted = sampled * (AMPLE / vocab_size)
        if k > 0:
            mean = k * (sampled / vocab_size)
            wanted = mean + DEVIATIONS * tl.sqrt(mean) + SMALL
        line = logits + row.to(tl.int64) * logits_strides[0]
        key = _search(
            False, True, wanted.to(tl.int64), LOWEST_KEY, HIGHEST_KEY, ROUGH, LOWEST_KEY, 0.0, 0.0,
            line, line, line, logits_strides[1], sampled, run, False, 1.0,
        )  # fmt: skip
        low = _value(key)
        if k == 0 and p < 1:
            _describe(floats + row * NUM_FLOATS, line, logits_strides[1], sampled, run)
    _set_bounds(ints + row * NUM_INTS, floats + row * NUM_FLOATS, low, high)
    tl.store(ints + row * NUM_INTS + DRAWN, 0)


@triton.jit
def _describe(bounds, line, column_stride, sampled, run):
    """Mean and standard deviation of a sample of the row."""
    number, sums, squares = 0.0, 0.0, 0.0
    for first in range(0, sampled, ITEMS):
        x = _x(first + tl.arange(0, ITEMS), line, line, column_stride, sampled, run, False, 1.0)
        finite = x > -INFINITY
        x = tl.where(finite, x, 0.0)
        number += tl.sum(finite.to(tl.float32), 0)
        sums += tl.sum(x, 0)
        squares += tl.sum(x * x, 0)
    mean = sums / number
    tl.store(bounds + MEAN, mean)
    tl.store(bounds + DEVIATION, tl.sqrt(max(squares / number - mean * mean, 0.0)))


@triton.jit
def _settings(row, given, settings, strides, vocab_size):
    """Of a row: its divisor, whether it is greedy, k or 0, p or 1, and min-p or 0. `given`: a bit for each setting."""
    temperature = tl.load(settings[0] + row * strides[0], (given & TEMPERATURE) != 0, 1.0)
    k = tl.load(settings[1] + row * strides[1], (given & TOP_K) != 0, 0).to(tl.int32)
    p = tl.load(settings[2] + row * strides[2], (given & TOP_P) != 0, 1.0)
    least = tl.load(settings[3] + row * strides[3], (given & MIN_P) != 0, 0.0)
    greedy = temperature < GREEDY_BELOW
    return tl.where(greedy, 1.0, temperature), greedy, tl.where(k < vocab_size, k, 0), p, least


@triton.jit
def _set_bounds(state, bounds, low, high):
    tl.store(bounds + LOW, low)
    tl.store(bounds + HIGH, high)
    tl.store(state + TICKETS, 0)
    tl.store(state + LISTED, 0)


@triton.jit(do_not_specialize=["vocab_size", "num_chunks", "given", "capacity"])
def draw(
    logits, logits_strides, vocab_size, num_chunks, keys, tokens, given, settings, strides,
    ints, floats, parts, part_ids, listed_logits, listed_ids, capacity,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, FILTERED: tl.constexpr, PROCESSED: tl.constexpr,
    FINAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program for each chunk of each row. FINAL: whether rows cannot be left for another launch."""
    begin(OVERLAP)
    row, chunk = tl.program_id(0) // num_chunks, tl.program_id(0) % num_chunks
    state, bounds = ints + row * NUM_INTS, floats + row * NUM_FLOATS
    if FILTERED and tl.load(state + DRAWN) != 0:
        return
    low, high = tl.load(bounds + LOW), tl.load(bounds + HIGH)
    scale, greedy, k, p, least = _settings(row, given, settings, strides, vocab_size)
    seed = tl.load(keys + row * strides[4])
    line = logits + row.to(tl.int64) * logits_strides[0]
    part = row * num_chunks + chunk

    place = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(line + place.to(tl.int64) * logits_strides[1], place < vocab_size, -INFINITY).to(tl.float32)
    top = tl.max(logit, 0)
    tl.store(parts + part * NUM_PARTS + CHUNK_TOP, top)
    if (FILTERED or PROCESSED) and (k == 0 and (PROCESSED or not greedy)):
        weight = _weight(logit, top, scale)
        tl.store(parts + part * NUM_PARTS + CHUNK_TOTAL, tl.sum(weight, 0))
        tl.store(parts + part * NUM_PARTS + CHUNK_CERTAIN, tl.sum(tl.where(logit >= high, weight, 0.0), 0))
        if FILTERED and (not FINAL and p < 1):
            mean, deviation = tl.load(bounds + MEAN), tl.load(bounds + DEVIATION)
            for pivot in tl.static_range(NUM_PIVOTS):
                above = tl.where(logit >= mean + deviation * PIVOTS[pivot], weight, 0.0)
                tl.store(parts + part * NUM_PARTS + CHUNK_PIVOTS + pivot, tl.sum(above, 0))
    score, winner = -INFINITY, vocab_size
    if greedy:
        score, winner = top, tl.min(tl.where(logit == top, place, vocab_size), 0)
    elif top >= high:
        score, winner = _race_chunk(logit, place, high, top, scale, seed, chunk, vocab_size, CHUNK)
    tl.store(parts + part * NUM_PARTS + CHUNK_SCORE, score)
    tl.store(part_ids + part, winner)
    if FILTERED and low < INFINITY:
        among = (logit >= low) & (logit < high) & (logit > -INFINITY)
        rank = tl.cumsum(among.to(tl.int32), 0)
        number = tl.sum(among.to(tl.int32), 0)
        if number > 0:
            slot = tl.atomic_add(state + LISTED, number, sem="relaxed") + rank - 1
            first = row.to(tl.int64) * capacity
            tl.store(listed_logits + first + slot, logit, among & (slot < capacity))
            tl.store(listed_ids + first + slot, place, among & (slot < capacity))

    tl.debug_barrier()  # what all threads have stored is there before the ticket that tells of it
    if tl.atomic_add(state + TICKETS, 1, sem="acq_rel") == num_chunks - 1:
        _finish(
            row, line, logits_strides[1], vocab_size, num_chunks, seed, tokens, scale, greedy, k, p, least, low, high,
            state, bounds, parts + row * num_chunks * NUM_PARTS, part_ids + row * num_chunks,
            listed_logits + row.to(tl.int64) * capacity, listed_ids + row.to(tl.int64) * capacity, capacity,
            CHUNKS, FILTERED, PROCESSED, FINAL,
        )  # fmt: skip


@triton.jit
def _race_chunk(logit, place, high, top, scale, seed, chunk, vocab_size, CHUNK: tl.constexpr):
    """The best score, as a multiple of the largest weight in the chunk, and its token, of those that reach `high`."""
    words = tl.randint4x(seed, chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4))
    words = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3])).reshape(CHUNK)
    score = tl.where(logit >= high, _weight(logit, top, scale) / _exponential(words), -1.0)
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, place, vocab_size), 0)


@triton.jit
def _finish(
    row, line, column_stride, vocab_size, num_chunks, seed, tokens, scale, greedy, k, p, least, low, high,
    state, bounds, parts, part_ids, listed_logits, listed_ids, capacity,
    CHUNKS: tl.constexpr, FILTERED: tl.constexpr, PROCESSED: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """Puts the chunks of a row together, and draws its token or sets closer bounds."""
    chunk = tl.arange(0, CHUNKS)
    tops = tl.load(parts + chunk * NUM_PARTS + CHUNK_TOP, chunk < num_chunks, -INFINITY)
    scores = tl.load(parts + chunk * NUM_PARTS + CHUNK_SCORE, chunk < num_chunks, -INFINITY)
    winners = tl.load(part_ids + chunk, chunk < num_chunks, vocab_size)
    top = tl.max(tops, 0)
    share = _weight(tops, top, scale)
    if not greedy:
        scores *= share
    score = tl.max(scores, 0)
    winner = tl.min(tl.where(scores == score, winners, vocab_size), 0)
    total, certain = 0.0, 0.0
    if (FILTERED or PROCESSED) and (k == 0 and (PROCESSED or not greedy)):
        totals = tl.load(parts + chunk * NUM_PARTS + CHUNK_TOTAL, chunk < num_chunks, 0.0)
        certains = tl.load(parts + chunk * NUM_PARTS + CHUNK_CERTAIN, chunk < num_chunks, 0.0)
        total, certain = tl.sum(totals * share, 0), tl.sum(certains * share, 0)
    top = _divided(top, scale)

    drawn, cut, last, kept = True, LOWEST_KEY, vocab_size, total
    if FILTERED and (k > 0 or p < 1 or least > 0) and (PROCESSED or not greedy):
        number = tl.load(state + LISTED)
        listed, run = number <= capacity, RUN
        lowest, highest, goal, drawn = _check(
            k, p, least, low, high, top, total, certain,
            line, listed_logits, column_stride, number, run, listed, scale,
        )  # fmt: skip
        exhaust = not drawn
        if not FINAL:
            alone = listed and (k == 0 and (p == 1 or least == 0))
            exhaust = exhaust and not alone
        if exhaust:
            drawn, listed, number = True, False, vocab_size
            lowest, highest, certain = LOWEST_KEY, _key(top), 0.0
            goal = tl.ceil(p * total * ONE).to(tl.int64)
        if drawn:
            cut, last, kept, score, winner = _cut_and_race(
                k, p, least, lowest, highest, goal, certain, top, score, winner, seed, greedy, vocab_size,
                line, listed_logits, listed_ids, column_stride, number, run, listed, scale,
            )  # fmt: skip
        elif not FINAL:
            _narrow(
                state, bounds, p * total, low, least, top, scale, parts, share, num_chunks, CHUNKS,
            )  # fmt: skip
    if drawn:
        tl.store(state + DRAWN, 1)
        # A row without a finite logit, or with NaN, gets some token.
        tl.store(tokens + row, tl.where(winner < vocab_size, winner, 0).to(tl.int64))
        if PROCESSED:
            tl.store(state + CUT, cut)
            tl.store(state + LAST, last)
            tl.store(bounds + TOP, top)
            tl.store(bounds + TOTAL, tl.log(kept))


@triton.jit
def _check(
    k, p, least, low, high, top, total, certain,
    line, listed_logits, column_stride, number, run, listed, scale,
):  # fmt: skip
    """The keys among which the cuts must lie, what top-p alone wants of the candidates, and whether it is all there.

    Bounds themselves are left out: other logits may have the same x.
    """
    lowest, highest = LOWEST_KEY, _key(top)
    if low > -INFINITY:
        lowest = _key(_divided(low, scale)) + 1
    if high < INFINITY:
        highest = _key(_divided(high, scale)) - 1
    goal = tl.ceil((p * total - certain) * ONE).to(tl.int64)
    most, fewest, _ = _reached(
        lowest, highest + 1, highest + 1, False, k > 0, LOWEST_KEY, 0.0, top,
        line, listed_logits, listed_logits, column_stride, tl.where(listed, number, 0), run, True, scale,
    )  # fmt: skip
    if k > 0:
        enough, few = most >= k, True
    elif least > 0:
        enough, few = False, tl.exp2((_divided(high, scale) - top) * LOG2E) >= least
    else:
        enough, few = most >= goal, fewest < goal
    enough = enough or low == -INFINITY or tl.exp2((_divided(low, scale) - top) * LOG2E) < least
    return lowest, highest, goal, listed and enough and (few or high == INFINITY)


@triton.jit
def _cut_and_race(
    k, p, least, lowest, highest, goal, certain, top, score, winner, seed, greedy, vocab_size,
    line, listed_logits, listed_ids, column_stride, number, run, listed, scale,
):  # fmt: skip
    """The cut, the last index that is kept at it, the sum of the weights that are kept, and the winner of the race."""
    floor, last = LOWEST_KEY, vocab_size
    if k > 0:
        floor = _search(
            False, True, k.to(tl.int64), lowest, highest, 0, LOWEST_KEY, 0.0, top,
            line, listed_logits, listed_ids, column_stride, number, run, listed, scale,
        )  # fmt: skip
    cut = floor
    if p < 1:
        if k > 0 or least > 0:
            reached, _, _ = _reached(
                LOWEST_KEY, LOWEST_KEY, LOWEST_KEY, False, False, floor, least, top,
                line, listed_logits, listed_ids, column_stride, number, run, listed, scale,
            )  # fmt: skip
            goal = tl.ceil(p * reached.to(tl.float32)).to(tl.int64)
        cut = _search(
            False, False, goal, max(lowest, floor), highest, 0, floor, least, top,
            line, listed_logits, listed_ids, column_stride, number, run, listed, scale,
        )  # fmt: skip
        reached, above, _ = _reached(
            cut, cut + 1, cut + 1, False, False, floor, least, top,
            line, listed_logits, listed_ids, column_stride, number, run, listed, scale,
        )  # fmt: skip
        each = max(_fixed(tl.exp2((_value(cut) - top) * LOG2E)), 1)
        equal = (reached - above + each // 2) // each
        wanted = max((goal - above + each - 1) // each, 1)
        if wanted < equal:
            last = -1 - _search(
                True, True, wanted, -vocab_size, -1, 0, cut, 0.0, top,
                line, listed_logits, listed_ids, column_stride, number, run, listed, scale,
            )  # fmt: skip

    best, best_id = tl.full((ITEMS,), -1.0, tl.float32), tl.full((ITEMS,), 0, tl.int32) + vocab_size
    kept = tl.full((), 0, tl.int64)
    for first in range(0, number, ITEMS):
        item = first + tl.arange(0, ITEMS)
        x = _x(item, line, listed_logits, column_stride, number, run, listed, scale)
        token = _token(item, listed_ids, number, run, listed)
        weight = tl.where(_is_kept(x, token, cut, last, least, top), tl.exp2((x - top) * LOG2E), 0.0)
        kept += tl.sum(_fixed(weight), 0)
        if not greedy:
            words = tl.randint4x(seed, token // 4)
            lane = token % 4
            word = tl.where(lane < 2, tl.where(lane == 0, words[0], words[1]), tl.where(lane == 2, words[2], words[3]))
            mine = tl.where(weight > 0, weight / _exponential(word), -1.0)
            better = (mine > best) | ((mine == best) & (token < best_id))
            best, best_id = tl.where(better, mine, best), tl.where(better, token, best_id)
    if not greedy:
        highest_score = tl.max(best, 0)
        first_best = tl.min(tl.where(best == highest_score, best_id, vocab_size), 0)
        if certain == 0 or highest_score > score or (highest_score == score and first_best < winner):
            score, winner = highest_score, first_best
    return cut, last, certain + kept.to(tl.float32) / ONE, score, winner


@triton.jit
def _narrow(state, bounds, wanted, low, least, top, scale, parts, share, num_chunks, CHUNKS: tl.constexpr):
    """Closer bounds for a row of which too little was listed, with top-p alone or with min-p alone."""
    closer, high = -INFINITY, low
    if least > 0:  # where min-p cuts is known by now
        low = (top + tl.log(least)) * scale
        margin = (tl.abs(low) + tl.abs(top * scale)) * 1e-5 + 1e-30
        closer, high = low - margin, low + margin
    else:
        mean, deviation = tl.load(bounds + MEAN), tl.load(bounds + DEVIATION)
        chunk = tl.arange(0, CHUNKS)
        for pivot in tl.static_range(NUM_PIVOTS):
            value = mean + deviation * PIVOTS[pivot]
            sums = tl.load(parts + chunk * NUM_PARTS + CHUNK_PIVOTS + pivot, chunk < num_chunks, 0.0)
            enough = tl.sum(sums * share, 0) >= wanted
            closer = tl.where(enough, max(closer, value), closer)
            high = tl.where(enough, high, min(high, value))
    _set_bounds(state, bounds, closer, high)


@triton.jit
def _sample(vocab_size):
    """How many tokens of a row are looked at to guess, and how far apart runs of them start."""
    sampled, run = vocab_size, RUN
    if vocab_size > SAMPLE:
        sampled, run = SAMPLE, vocab_size // (SAMPLE // RUN) // RUN * RUN
    return sampled, run


@triton.jit
def _search(
    TIES: tl.constexpr, counting, goal, low, high, precision, floor, least, top,
    line, listed_logits, listed_ids, column_stride, number, run, listed, scale,
):  # fmt: skip
    """The highest key up to `high` that items adding up to `goal` reach, or less by up to `precision`; else `low`."""
    zero = tl.full((), 0, tl.int64)
    first, last = zero + low, zero + high
    while last - first > precision:
        step = (last - first + 3) // 4
        one, two, three = _reached(
            min(first + step, last).to(tl.int32), min(first + 2 * step, last).to(tl.int32),
            min(first + 3 * step, last).to(tl.int32), TIES, counting, floor, least, top,
            line, listed_logits, listed_ids, column_stride, number, run, listed, scale,
        )  # fmt: skip
        steps = (one >= goal).to(tl.int64) + (two >= goal).to(tl.int64) + (three >= goal).to(tl.int64)
        if steps < 3:
            last = min(first + step * (steps + 1), last) - 1
        first = min(first + step * steps, last)
    return first.to(tl.int32)


@triton.jit
def _reached(
    one, two, three, TIES: tl.constexpr, counting, floor, least, top,
    line, listed_logits, listed_ids, column_stride, number, run, listed, scale,
):  # fmt: skip
    """What the items at or above each of three keys add up to.

    counting: how many they are; else their weights, if they pass floor and min-p. TIES: how many items have the key
    `floor`, where key means −1 − token.
    """
    above_one = tl.zeros((ITEMS,), tl.int64)
    above_two, above_three = above_one, above_one
    for first in range(0, number, ITEMS):
        item = first + tl.arange(0, ITEMS)
        x = _x(item, line, listed_logits, column_stride, number, run, listed, scale)
        own = _key(x)
        if TIES:
            amount = (own == floor).to(tl.int64)
            own = -1 - _token(item, listed_ids, number, run, listed)
        else:
            weight = tl.exp2((x - top) * LOG2E)
            weight = tl.where(weight >= least, weight, 0.0)
            if counting:
                weight = tl.where(own > LOWEST_KEY, 1 / ONE, 0.0)
            amount = _fixed(tl.where(own >= floor, weight, 0.0))
        above_one += tl.where(own >= one, amount, 0)
        above_two += tl.where(own >= two, amount, 0)
        above_three += tl.where(own >= three, amount, 0)
    return tl.sum(above_one, 0), tl.sum(above_two, 0), tl.sum(above_three, 0)


@triton.jit
def _x(item, line, listed_logits, column_stride, number, run, listed, scale):
    """x of items: of the candidates if `listed`, else of runs of tokens. −inf beyond their number."""
    if listed:
        logit = tl.load(listed_logits + item, item < number, -INFINITY).to(tl.float32)
    else:
        token = item // RUN * run + item % RUN
        logit = tl.load(line + token.to(tl.int64) * column_stride, item < number, -INFINITY).to(tl.float32)
    return _divided(logit, scale)


@triton.jit
def _token(item, listed_ids, number, run, listed):
    token = item // RUN * run + item % RUN
    if listed:
        token = tl.load(listed_ids + item, item < number, 0)
    return token


@triton.jit
def _is_kept(x, token, cut, last, least, top):
    """Whether tokens are kept: above the cut, or at it up to the index `last`, and by min-p."""
    key = _key(x)
    return ((key > cut) | ((key == cut) & (token <= last))) & (tl.exp2((x - top) * LOG2E) >= least)


@triton.jit
def _divided(logit, scale):
    """logit / scale, rounded as by PyTorch, since it matters which x are equal: by Markstein's correction of a product
    with the rounded reciprocal.
    """
    reciprocal = tl.div_rn(1.0, scale)
    product = logit * reciprocal
    corrected = tl.fma(tl.fma(-product, scale, logit), reciprocal, product)
    return tl.where(tl.abs(product) < INFINITY, corrected, product)


@triton.jit
def _weight(logit, top, scale):
    """The weights of logits as multiples of that of the largest one."""
    return tl.exp2((logit - tl.where(top == -INFINITY, 0.0, top)) * (LOG2E / scale))


@triton.jit
def _fixed(weight):
    return (weight * ONE).to(tl.int64)


@triton.jit
def _key(x):
    """Integers in the order of the values; of both zeros the same."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """The inverse of `_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _exponential(words):
    """`philox.exponential` of random words.

    log1p(−u) is log(w) · u / (1 − w) of w = 1 − u as it is rounded, which is precise where u is small.
    """
    uniform = tl.minimum((words.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * (2.0**-32), LARGEST_UNIFORM)
    rest = 1.0 - uniform
    tiny = rest == 1.0
    return tl.where(tiny, uniform, -tl.log(rest) * uniform / tl.where(tiny, 1.0, 1.0 - rest))


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
    x = _divided(x, scale)
    kept = _is_kept(x, place, cut, last, least, top)
    if LOGPROBS:
        x = (x - top) - total
    tl.store(out + row.to(tl.int64) * vocab_size + place, tl.where(kept, x, -INFINITY), place < vocab_size)
