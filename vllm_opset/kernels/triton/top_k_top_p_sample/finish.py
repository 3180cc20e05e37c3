"""The kernel `finish` of top_k_top_p_sample: filters a row and samples its token.

`read` describes how the kernels work together.
"""

import triton
import triton.language as tl

from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton.top_k_top_p_sample._noise import (
    noise_of,
)
from vllm_opset.kernels.triton.top_k_top_p_sample._reject import (
    best_kept_rival,
    reject_late,
    reject_listed,
    sample_listed,
)
from vllm_opset.kernels.triton.top_k_top_p_sample._rows import (
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
    NUM_FLOATS,
    NUM_INTS,
    NUM_PARTS,
    NUM_PIVOTS,
    NUM_RIVALS,
    REJECTION,
    RELISTED,
    SAMPLED,
    SEARCH_CLOSER_LIST,
    STRATEGY,
    SUM_ERROR,
    TOTAL,
    USE_LIST,
    reduce_argmax,
    settings_of,
)
from vllm_opset.kernels.triton.top_k_top_p_sample._search import (
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
    reached_at,
    search,
    token_of,
    value_of,
    weight_of,
    x_of,
)


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
        sampled = reject_listed(
            tl.ceil(p * total * ONE).to(tl.int64), p, least, LOWEST_KEY, number, row_logits, row_ids,
            line, column_stride, top_logit, scale, seed, vocab_size,
        )  # fmt: skip
    elif REREAD and (strategy == REJECTION):
        sampled = best_kept_rival(
            sampled, p * total, ints + row * NUM_INTS, chunk_weight, pivot_sums + row * num_chunks * NUM_PIVOTS,
            line, column_stride, top_logit, scale, seed, vocab_size, num_chunks, CHUNK, CHUNKS,
        )  # fmt: skip
    elif REREAD and (strategy == LATE_REJECTION):
        certains = tl.load(parts + chunk * NUM_PARTS + CHUNK_LISTED, chunk < num_chunks, 0.0)
        sampled = reject_late(
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
            sampled = sample_listed(
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
