"""The kernel `finish` of top_k_top_p_sample: cuts and races a row, after closer bounds or a second reading if need be.

`_sampling.py` says how it works, and has the other kernels; what they share is in `_sampling_rows.py`, and the search
among candidates in `_sampling_search.py`.
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

# Where the weights of a row of which top-p keeps many are added up, in standard deviations from the mean.
PIVOTS = tl.constexpr(16)
FIRST_PIVOT, BETWEEN_PIVOTS = tl.constexpr(1.5), tl.constexpr(0.2)
AT_PIVOTS = tl.constexpr(512)  # compared with the pivots together


@triton.jit(do_not_specialize=["vocab_size", "num_chunks", "given", "processed", "capacity"])
def finish(
    logits, logits_strides, vocab_size, num_chunks, keys, tokens, given, settings, strides, processed,
    ints, floats, parts, part_ids, listed_logits, listed_ids, capacity,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, FILTERED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a row: its token."""
    begin(OVERLAP)
    row = tl.program_id(0)
    scale, greedy, k, p, least = settings_of(row, given, settings, strides, vocab_size)
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
    score, winner = first_of_best(scores, winners, vocab_size)
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
    best, racer = nobody(vocab_size, RACERS)
    listed = ints + LISTED
    tl.store(listed, 0)
    tl.debug_barrier()
    for chunk in range(0, num_chunks):
        place = chunk * CHUNK + tl.arange(0, CHUNK)
        logit = tl.load(line + place.to(tl.int64) * column_stride, place < vocab_size, -INFINITY).to(tl.float32)
        among = (logit >= low) & (logit < high) & (logit > -INFINITY)
        list_candidates(logit, place, among, listed, listed_logits, listed_ids, row, capacity)
        certain += tl.where(logit >= high, weight_of(logit, top, scale), 0.0)
        if not greedy:
            best, racer = race(
                best, racer, line, column_stride, chunk * CHUNK, high, top, scale, seed, vocab_size, CHUNK
            )
    if not greedy:
        score, winner = first_of_best(best, racer, vocab_size)
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

    best, best_id = nobody(vocab_size, ITEMS)
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
        highest_score, first_best = first_of_best(best, best_id, vocab_size)
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
