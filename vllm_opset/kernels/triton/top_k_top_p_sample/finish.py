"""The kernel `finish` of top_k_top_p_sample: filters a row and samples its token.

`read` describes how the kernels work together.
"""

import triton
import triton.language as tl

from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton.top_k_top_p_sample._noise import WORDS, noise_of, noise_of_block
from vllm_opset.kernels.triton.top_k_top_p_sample._rows import (
    ARGMAX_BLOCK,
    CHUNK_CERTAIN,
    CHUNK_LISTED,
    CHUNK_MAX,
    CHUNK_SCORE,
    CHUNK_TOTAL,
    CLOSER_HIGH,
    CLOSER_LOW,
    CUT,
    LAST,
    LATE_REJECTION,
    LISTED,
    LOW,
    MAX_X,
    MOST_RIVALS,
    NUM_FLOATS,
    NUM_INTS,
    NUM_PARTS,
    NUM_PIVOTS,
    NUM_RIVALS,
    REJECTION,
    RELISTED,
    RIVALS,
    SAMPLED,
    SEARCH_CLOSER_LIST,
    STRATEGY,
    SUM_ERROR,
    TOTAL,
    USE_LIST,
    best_listed,
    empty_argmax,
    precedes,
    reduce_argmax,
    settings_of,
    update_argmax,
    x_of_token,
)
from vllm_opset.kernels.triton.top_k_top_p_sample._search import (
    FEW,
    INFINITY,
    ITEMS,
    LOG2E,
    LOWEST_KEY,
    ONE,
    RUN,
    divided,
    in_fixed_point,
    is_kept,
    key_of,
    kth_key_of_few,
    reached_at,
    search,
    token_of,
    value_of,
    weight_of,
    x_of,
)

SUM_BLOCK = tl.constexpr(4096)  # tokens of one step of a sum over a row


@triton.jit(do_not_specialize=["vocab_size", "num_chunks", "given", "processed", "capacity"])
def finish(
    logits, logits_strides, vocab_size, num_chunks, keys, tokens, given, settings, strides, processed,
    ints, floats, parts, part_ids, pivot_sums, listed_logits, listed_ids, capacity,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, FILTERED: tl.constexpr, REREAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Chooses the token of a row, with one program per row."""
    row = tl.program_id(0)
    # The previous kernels have waited for whatever wrote the arguments, so they can be loaded while these end.
    scale, greedy, k, p, least = settings_of(row, given, settings, strides, vocab_size)
    seed = tl.load(keys + row * strides[4])
    pdl_wait(PDL)
    line, column_stride = logits + row.to(tl.int64) * logits_strides[0], logits_strides[1]
    parts += row * num_chunks * NUM_PARTS
    chunk = tl.arange(0, CHUNKS)
    tops = tl.load(parts + chunk * NUM_PARTS + CHUNK_MAX, chunk < num_chunks, -INFINITY)
    scores = tl.load(parts + chunk * NUM_PARTS + CHUNK_SCORE, chunk < num_chunks, -INFINITY)
    tokens_of_chunks = tl.load(part_ids + row * num_chunks + chunk, chunk < num_chunks, vocab_size)
    top_logit = tl.max(tops, 0)
    chunk_weight = weight_of(tops, top_logit, scale)
    if not greedy:
        scores *= chunk_weight
    score, sampled = reduce_argmax(scores, tokens_of_chunks, vocab_size)
    total, certain = 0.0, 0.0
    if k == 0 and (processed != 0 or (REREAD and not greedy)):
        totals = tl.load(parts + chunk * NUM_PARTS + CHUNK_TOTAL, chunk < num_chunks, 0.0)
        total = tl.sum(totals * chunk_weight, 0)
    top = divided(top_logit, scale)

    cut, last, kept = LOWEST_KEY, vocab_size, total
    strategy, number, whole = USE_LIST, 0, False
    if FILTERED:
        number = tl.load(ints + row * NUM_INTS + LISTED)
    if REREAD:
        strategy = tl.load(ints + row * NUM_INTS + STRATEGY)
        # Whether the call asks only for a token, and a list holds all tokens that are kept.
        whole = strategy == USE_LIST and ((k == 0 and ((p < 1) != (least > 0))) and (processed == 0 and not greedy))
        if strategy == REJECTION:  # noqa: SIM102  `and` would load the number of rivals of every row
            if tl.load(ints + row * NUM_INTS + NUM_RIVALS) < 0:
                number = tl.load(ints + row * NUM_INTS + RELISTED)
                sums = tl.load(pivot_sums + (row * num_chunks + chunk) * NUM_PIVOTS, chunk < num_chunks, 0.0)
                whole = number <= capacity and tl.sum(sums * chunk_weight, 0) >= p * total * (1 + SUM_ERROR)
    row_logits, row_ids = listed_logits + row.to(tl.int64) * capacity, listed_ids + row.to(tl.int64) * capacity
    if REREAD and whole:
        sampled = _reject_listed(
            tl.ceil(p * total * ONE).to(tl.int64), p, least, LOWEST_KEY, number, row_logits, row_ids,
            line, column_stride, top_logit, scale, seed, vocab_size,
        )  # fmt: skip
    elif REREAD and (strategy == REJECTION):
        sampled = _best_kept_rival(
            sampled, p * total, ints + row * NUM_INTS, chunk_weight, pivot_sums + row * num_chunks * NUM_PIVOTS,
            line, column_stride, top_logit, scale, seed, vocab_size, num_chunks, CHUNK, CHUNKS,
        )  # fmt: skip
    elif REREAD and (strategy == LATE_REJECTION):
        certains = tl.load(parts + chunk * NUM_PARTS + CHUNK_LISTED, chunk < num_chunks, 0.0)
        sampled = _reject_late(
            score, sampled, p * total, tl.sum(certains * chunk_weight, 0), tl.load(ints + row * NUM_INTS + RELISTED),
            row_logits, row_ids, capacity, line, column_stride, top_logit, scale, seed, vocab_size, num_chunks, CHUNK,
        )  # fmt: skip
    elif FILTERED and (strategy != SAMPLED and ((k > 0 or p < 1 or least > 0) and (processed != 0 or not greedy))):
        low, high, run = tl.load(floats + row * NUM_FLOATS + LOW), INFINITY, RUN
        if strategy == SEARCH_CLOSER_LIST:
            low, high = (
                tl.load(floats + row * NUM_FLOATS + CLOSER_LOW),
                tl.load(floats + row * NUM_FLOATS + CLOSER_HIGH),
            )
            number = tl.load(ints + row * NUM_INTS + RELISTED)
            certains = tl.load(parts + chunk * NUM_PARTS + CHUNK_CERTAIN, chunk < num_chunks, 0.0)
            certain = tl.sum(certains * chunk_weight, 0)
        lowest, highest, goal, listed = _check(
            k, p, least, low, high, top, total, certain,
            line, row_logits, row_ids, column_stride, number, capacity, scale,
        )  # fmt: skip
        if listed and processed == 0:
            sampled = _sample_listed(
                k, p, least, lowest, highest, number, row_logits, row_ids,
                line, column_stride, top_logit, scale, seed, vocab_size,
            )  # fmt: skip
        else:
            if not listed:
                lowest, highest, number, certain = LOWEST_KEY, key_of(top), vocab_size, 0.0
                goal = tl.ceil(p * total * ONE).to(tl.int64)
            cut, last, kept, score, sampled = _filter_and_sample(
                k, p, least, lowest, highest, goal, certain, top, score, sampled, seed, greedy, vocab_size,
                line, row_logits, row_ids, column_stride, number, run, listed, scale,
            )  # fmt: skip
    # A row without a finite logit, or with NaN, gets an arbitrary valid token.
    tl.store(tokens + row, tl.where(sampled < vocab_size, sampled, 0).to(tl.int64))
    tl.store(ints + row * NUM_INTS + CUT, cut)
    tl.store(ints + row * NUM_INTS + LAST, last)
    tl.store(floats + row * NUM_FLOATS + MAX_X, top)
    tl.store(floats + row * NUM_FLOATS + TOTAL, tl.log(kept))


@triton.jit
def _best_kept_rival(
    sampled, wanted, row_ints, chunk_weight, sums, line, column_stride, top, scale, seed, vocab_size, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The first rival of a row that top-p keeps, or else the sampled token. wanted: the weight that top-p keeps."""
    chunk = tl.arange(0, CHUNKS)
    num_rivals = tl.load(row_ints + NUM_RIVALS)
    current, kept = 0, num_rivals == 0
    rival = vocab_size
    while current < num_rivals and not kept:
        before = tl.load(sums + chunk * NUM_PIVOTS + current, chunk < num_chunks, 0.0)
        kept = not (tl.sum(before * chunk_weight, 0) >= wanted)
        rival = tl.load(row_ints + RIVALS + current)
        if kept:
            sampled = rival
        current += 1
    if not kept and (num_rivals < 0 or num_rivals == MOST_RIVALS):
        sampled = _sample_until_kept(
            rival, wanted, line, column_stride, top, scale, seed, vocab_size, num_chunks, CHUNK
        )
    return sampled


@triton.jit
def _reject_late(
    score, sampled, wanted, certain, number, listed_logits, listed_ids, capacity,
    line, column_stride, top, scale, seed, vocab_size, num_chunks, CHUNK: tl.constexpr,
):  # fmt: skip
    """The best listed rival with a score above `score` that top-p keeps, or else the sampled token.

    certain: the weight of the tokens that were taken to be kept. If top-p keeps less than that, all are sampled again.
    """
    if number > capacity or certain >= wanted * (1 - SUM_ERROR):
        sampled = _sample_until_kept(
            vocab_size, wanted, line, column_stride, top, scale, seed, vocab_size, num_chunks, CHUNK
        )
    else:
        rival, bound, kept = vocab_size, -INFINITY, False
        while not kept:
            best, rival = best_listed(
                bound, rival, 0.0, listed_logits, listed_ids, number, top, scale, seed, vocab_size, ITEMS
            )
            kept = not (best > score)
            if not kept:
                bound = x_of_token(rival, line, column_stride, scale, vocab_size)
                kept = not (_weight_before(rival, bound, line, column_stride, top, scale, vocab_size) >= wanted)
                if kept:
                    sampled = rival
    return sampled


@triton.jit
def _sample_listed(
    k, p, least, lowest, highest, number, listed_logits, listed_ids,
    line, column_stride, top, scale, seed, vocab_size,
):  # fmt: skip
    """Samples a token of a list that holds all tokens that top-k, or min-p with top-p, keep."""
    floor = LOWEST_KEY
    if k > 0:
        if number < FEW:
            floor = kth_key_of_few(k, lowest, highest, listed_logits, number, scale)
        else:
            floor = search(
                False, True, k.to(tl.int64), lowest, highest, 0, LOWEST_KEY, 0.0, divided(top, scale),
                line, listed_logits, listed_ids, column_stride, number, RUN, True, scale,
            )  # fmt: skip
    goal = tl.full((), 0, tl.int64)
    if p < 1:
        reached = reached_at(
            LOWEST_KEY, LOWEST_KEY, LOWEST_KEY, False, False, floor, least, divided(top, scale),
            line, listed_logits, listed_ids, column_stride, number, RUN, True, scale,
        )  # fmt: skip
        goal = tl.ceil(p * tl.max(reached, 0).to(tl.float32)).to(tl.int64)
    return _reject_listed(
        goal, p, least, floor, number, listed_logits, listed_ids,
        line, column_stride, top, scale, seed, vocab_size,
    )  # fmt: skip


@triton.jit
def _reject_listed(
    goal, p, least, floor, number, listed_logits, listed_ids, line, column_stride, top, scale, seed, vocab_size
):
    """Samples a token of a list that holds all kept tokens: the best one from `floor` on that the others keep.

    goal: the weight that top-p keeps, in fixed point. floor: the key of top-k's cut-off.
    """
    sampled, bound, kept = vocab_size, value_of(tl.full((), 0, tl.int32) + floor), False
    while not kept:
        _, sampled = best_listed(
            bound, sampled, least, listed_logits, listed_ids, number, top, scale, seed, vocab_size, ITEMS
        )
        # Without top-p, the first one is the result.
        kept = p == 1 or sampled == vocab_size
        if not kept:
            bound = x_of_token(sampled, line, column_stride, scale, vocab_size)
            before = _listed_before(
                bound, sampled, listed_logits, listed_ids, number, divided(top, scale), scale, vocab_size
            )
            kept = before < goal or goal <= 0
    return sampled


@triton.jit
def _listed_before(bound, sampled, listed_logits, listed_ids, number, top, scale, vocab_size):
    """The sum of the weights of the listed tokens that come before `sampled`, in fixed point."""
    sums = tl.zeros((ITEMS,), tl.int64)
    for first in range(0, number, ITEMS):
        item = first + tl.arange(0, ITEMS)
        x = divided(tl.load(listed_logits + item, item < number, -INFINITY), scale)
        token = tl.load(listed_ids + item, item < number, vocab_size)
        weight = in_fixed_point(tl.exp2((x - top) * LOG2E))
        sums += tl.where(precedes(x, token, bound, sampled), weight, 0)
    return tl.sum(sums, 0)


@triton.jit
def _sample_until_kept(
    last, wanted, line, column_stride, top, scale, seed, vocab_size, num_chunks, CHUNK: tl.constexpr
):
    """Samples among the tokens before `last`, then among those before the result, until top-p keeps the result.

    This is the exponential argmax of all kept tokens, without knowing the cut-off: a dropped token is rejected, and all
    kept tokens come before it. last: a token that is dropped, or vocab_size. It takes long, as one program reads the
    row several times.
    """
    sampled, weight_before = last, wanted
    while weight_before >= wanted and wanted > 0:
        bound = x_of_token(sampled, line, column_stride, scale, vocab_size)
        best_weight, best_noise, best_token = empty_argmax(vocab_size, ARGMAX_BLOCK)
        for first in range(0, num_chunks * CHUNK, ARGMAX_BLOCK):
            token = first + tl.arange(0, ARGMAX_BLOCK)
            logit = tl.load(line + token.to(tl.int64) * column_stride, token < vocab_size, -INFINITY).to(tl.float32)
            before = precedes(divided(logit, scale), token, bound, sampled)
            best_weight, best_noise, best_token = update_argmax(
                best_weight, best_noise, best_token, tl.where(before, weight_of(logit, top, scale), 0.0),
                noise_of_block(seed, tl.arange(0, ARGMAX_BLOCK // WORDS) + first // WORDS), token,
            )  # fmt: skip
        _, sampled = reduce_argmax(best_weight / best_noise, best_token, vocab_size)
        bound = x_of_token(sampled, line, column_stride, scale, vocab_size)
        weight_before = _weight_before(sampled, bound, line, column_stride, top, scale, vocab_size)
    return sampled


@triton.jit
def _weight_before(sampled, bound, line, column_stride, top, scale, vocab_size):
    """The sum of the weights of the tokens that come before `sampled`, as a multiple of the largest weight."""
    sums = tl.zeros((SUM_BLOCK,), tl.float32)
    for first in range(0, vocab_size, SUM_BLOCK):
        token = first + tl.arange(0, SUM_BLOCK)
        logit = tl.load(line + token.to(tl.int64) * column_stride, token < vocab_size, -INFINITY).to(tl.float32)
        before = precedes(divided(logit, scale), token, bound, sampled)
        sums += tl.where(before, weight_of(logit, top, scale), 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _check(
    k, p, least, low, high, top, total, certain,
    line, listed_logits, listed_ids, column_stride, number, capacity, scale,
):  # fmt: skip
    """The range of keys for the cut-offs, the weight that top-p alone needs from the candidates, and if they suffice.

    The range excludes the bounds themselves, because logits outside the list may have the same x.
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
def _filter_and_sample(
    k, p, least, lowest, highest, goal, certain, top, score, sampled, seed, greedy, vocab_size,
    line, listed_logits, listed_ids, column_stride, number, run, listed, scale,
):  # fmt: skip
    """The cut-off, the last index that is kept at it, the sum of the kept weights, the best score, and its token."""
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

    best_score, best_token = tl.full((ITEMS,), -1.0, tl.float32), tl.full((ITEMS,), 0, tl.int32) + vocab_size
    kept = tl.full((), 0, tl.int64)
    for first in range(0, number, ITEMS):
        item = first + tl.arange(0, ITEMS)
        x = x_of(item, line, listed_logits, column_stride, number, run, listed, scale)
        token = token_of(item, listed_ids, number, run, listed)
        weight = tl.where(is_kept(x, token, cut, last, least, top), tl.exp2((x - top) * LOG2E), 0.0)
        kept += tl.sum(in_fixed_point(weight), 0)
        if not greedy:
            mine = tl.where(weight > 0, weight / noise_of(seed, token), -1.0)
            better = (mine > best_score) | ((mine == best_score) & (token < best_token))
            best_score, best_token = tl.where(better, mine, best_score), tl.where(better, token, best_token)
    if not greedy:
        highest_score, first_best = reduce_argmax(best_score, best_token, vocab_size)
        if certain == 0 or highest_score > score or (highest_score == score and first_best < sampled):
            score, sampled = highest_score, first_best
    return cut, last, certain + kept.to(tl.float32) / ONE, score, sampled
