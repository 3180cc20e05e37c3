"""The kernel `finish` of top_k_top_p_sample: filters a row and samples its token.

`read` describes how the kernels work together.
"""

import triton
import triton.language as tl

from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton.top_k_top_p_sample._rows import (
    ARGMAX_BLOCK,
    CHUNK_CERTAIN,
    CHUNK_LISTED,
    CHUNK_MAX,
    CHUNK_SCORE,
    CHUNK_SECOND,
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
    NUM_SAMPLED,
    REJECTION,
    RELISTED,
    SEARCH_CLOSER_LIST,
    SEARCH_LIST,
    STRATEGY,
    SUM_ERROR,
    TOTAL,
    empty_argmax,
    precedes,
    reduce_argmax,
    settings_of,
    update_argmax,
)
from vllm_opset.kernels.triton.top_k_top_p_sample._search import (
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


@triton.jit(do_not_specialize=["vocab_size", "num_chunks", "given", "processed", "capacity"])
def finish(
    logits, logits_strides, vocab_size, num_chunks, keys, tokens, given, settings, strides, processed,
    ints, floats, parts, part_ids, listed_logits, listed_ids, capacity,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, FILTERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Chooses the token of a row, with one program per row."""
    pdl_wait(PDL)
    row = tl.program_id(0)
    scale, greedy, k, p, least = settings_of(row, given, settings, strides, vocab_size)
    seed = tl.load(keys + row * strides[4])
    line, column_stride = logits + row.to(tl.int64) * logits_strides[0], logits_strides[1]
    parts += row * num_chunks * NUM_PARTS
    chunk = tl.arange(0, CHUNKS)
    tops = tl.load(parts + chunk * NUM_PARTS + CHUNK_MAX, chunk < num_chunks, -INFINITY)
    scores = tl.load(parts + chunk * NUM_PARTS + CHUNK_SCORE, chunk < num_chunks, -INFINITY)
    part_ids += row * num_chunks * NUM_SAMPLED
    tokens_of_chunks = tl.load(part_ids + chunk * NUM_SAMPLED, chunk < num_chunks, vocab_size)
    top_logit = tl.max(tops, 0)
    chunk_weight = weight_of(tops, top_logit, scale)
    if not greedy:
        scores *= chunk_weight
    score, sampled = reduce_argmax(scores, tokens_of_chunks, vocab_size)
    total, certain = 0.0, 0.0
    if k == 0 and (processed != 0 or (FILTERED and not greedy)):
        totals = tl.load(parts + chunk * NUM_PARTS + CHUNK_TOTAL, chunk < num_chunks, 0.0)
        total = tl.sum(totals * chunk_weight, 0)
    top = divided(top_logit, scale)

    cut, last, kept = LOWEST_KEY, vocab_size, total
    strategy = SEARCH_LIST
    if FILTERED:
        strategy = tl.load(ints + row * NUM_INTS + STRATEGY)
    if (strategy == REJECTION) | (strategy == LATE_REJECTION):
        wanted, weight_before, second = p * total, INFINITY, sampled
        if strategy == REJECTION:
            listed = tl.load(parts + chunk * NUM_PARTS + CHUNK_LISTED, chunk < num_chunks, 0.0)
            second = vocab_size
            if tl.sum(listed * chunk_weight, 0) >= wanted * (1 + SUM_ERROR):
                weights = tl.load(parts + chunk * NUM_PARTS + CHUNK_CERTAIN, chunk < num_chunks, 0.0)
                scores = tl.load(parts + chunk * NUM_PARTS + CHUNK_SECOND, chunk < num_chunks, -INFINITY)
                second_tokens = tl.load(part_ids + chunk * NUM_SAMPLED + 1, chunk < num_chunks, vocab_size)
                weight_before = tl.sum(weights * chunk_weight, 0)
                _, second = reduce_argmax(scores * chunk_weight, second_tokens, vocab_size)
        sampled = _sample_until_kept(
            sampled, weight_before, second, wanted, line, column_stride, top_logit, scale, seed, vocab_size, num_chunks,
            CHUNK,
        )  # fmt: skip
    elif FILTERED and ((k > 0 or p < 1 or least > 0) and (processed != 0 or not greedy)):
        low, high = tl.load(floats + row * NUM_FLOATS + LOW), INFINITY
        number, run = tl.load(ints + row * NUM_INTS + LISTED), RUN
        if strategy == SEARCH_CLOSER_LIST:
            low, high = (
                tl.load(floats + row * NUM_FLOATS + CLOSER_LOW),
                tl.load(floats + row * NUM_FLOATS + CLOSER_HIGH),
            )
            number = tl.load(ints + row * NUM_INTS + RELISTED)
            certains = tl.load(parts + chunk * NUM_PARTS + CHUNK_CERTAIN, chunk < num_chunks, 0.0)
            certain = tl.sum(certains * chunk_weight, 0)
        row_logits, row_ids = listed_logits + row.to(tl.int64) * capacity, listed_ids + row.to(tl.int64) * capacity
        lowest, highest, goal, listed = _check(
            k, p, least, low, high, top, total, certain,
            line, row_logits, row_ids, column_stride, number, capacity, scale,
        )  # fmt: skip
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
def _sample_until_kept(
    sampled, weight_before, second, wanted, line, column_stride, top, scale, seed, vocab_size, num_chunks,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Samples again among the tokens before the last sampled one, until top-p keeps the sampled token.

    The result is the exponential argmax of all kept tokens, without knowing the cut-off: a dropped token is rejected,
    and all kept tokens come before it.

    sampled: the first sampled token. weight_before: the sum of the weights before it, or inf if it is not known yet.

    second: the next token if the first is dropped; vocab_size to sample among all tokens. wanted: the weight that
    top-p keeps.
    """
    if weight_before >= wanted:
        sampled = second
        weight_before = _weight_before(sampled, line, column_stride, top, scale, vocab_size, num_chunks, CHUNK)
    while weight_before >= wanted and wanted > 0:
        bound = _x_of_token(sampled, line, column_stride, scale, vocab_size)
        best_score, best_token = empty_argmax(vocab_size, ARGMAX_BLOCK)
        for chunk in range(0, num_chunks):
            best_score, best_token = update_argmax(
                best_score, best_token, line, column_stride, chunk * CHUNK, bound, sampled, top, scale, seed,
                vocab_size, True, CHUNK,
            )  # fmt: skip
        _, sampled = reduce_argmax(best_score, best_token, vocab_size)
        weight_before = _weight_before(sampled, line, column_stride, top, scale, vocab_size, num_chunks, CHUNK)
    return sampled


@triton.jit
def _weight_before(sampled, line, column_stride, top, scale, vocab_size, num_chunks, CHUNK: tl.constexpr):
    """The sum of the weights of the tokens that come before `sampled`, as a multiple of the largest weight."""
    bound = _x_of_token(sampled, line, column_stride, scale, vocab_size)
    sums = tl.zeros((CHUNK,), tl.float32)
    for chunk in range(0, num_chunks):
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        logit = tl.load(line + token.to(tl.int64) * column_stride, token < vocab_size, -INFINITY).to(tl.float32)
        before = precedes(divided(logit, scale), token, bound, sampled)
        sums += tl.where(before, weight_of(logit, top, scale), 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _x_of_token(token, line, column_stride, scale, vocab_size):
    """x of a token. For vocab_size it is −inf, so that all tokens come before it."""
    logit = tl.load(line + token.to(tl.int64) * column_stride, token < vocab_size, -INFINITY)
    return divided(logit.to(tl.float32), scale)


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

    best_score, best_token = empty_argmax(vocab_size, ITEMS)
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
            better = (mine > best_score) | ((mine == best_score) & (token < best_token))
            best_score, best_token = tl.where(better, mine, best_score), tl.where(better, token, best_token)
    if not greedy:
        highest_score, first_best = reduce_argmax(best_score, best_token, vocab_size)
        if certain == 0 or highest_score > score or (highest_score == score and first_best < sampled):
            score, sampled = highest_score, first_best
    return cut, last, certain + kept.to(tl.float32) / ONE, score, sampled
