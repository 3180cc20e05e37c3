"""The kernel `reread` of top_k_top_p_sample: reads rows again if one read is not enough.

`read` describes how the kernels work together. This kernel handles rows that only top-p or only min-p filters.
It does the first of these for rows with rejection, and one of the others for rows whose list misses the cut-off:

- With rejection, it finds the rivals that beat the sampled token of a row, and sums the weights before each of them,
  which decide whether top-p keeps it. If the bounds were wrong, it lists the tokens that `read` would have listed
  without rejection. A sample without the largest weights of a row makes such bounds, and then the list is short.

- If the call asks only for tokens and the filter is top-p, it samples among the listed tokens, which are certain to be
  kept, and lists rivals among the others.

- If the call asks only for tokens and the filter is min-p, it samples among the tokens that min-p keeps.

- Otherwise it makes a list between closer bounds, which follow from the sums of `read`.

If the list of a row is sufficient, the row costs only a few loads.
"""

import triton
import triton.language as tl

from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton.top_k_top_p_sample._noise import WORDS, noise_of_block
from vllm_opset.kernels.triton.top_k_top_p_sample._rows import (
    ARGMAX_BLOCK,
    CHUNK_CERTAIN,
    CHUNK_LISTED,
    CHUNK_MAX,
    CHUNK_SCORE,
    CHUNK_TOTAL,
    CLOSER_HIGH,
    CLOSER_LOW,
    DEVIATION,
    ESTIMATE,
    LATE_REJECTION,
    LISTED,
    LOW,
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
    best_listed,
    chunk_argmax,
    empty_argmax,
    least_score_of,
    list_candidates,
    pivots_of,
    precedes,
    reduce_argmax,
    settings_of,
    update_argmax,
    x_of_token,
)
from vllm_opset.kernels.triton.top_k_top_p_sample._search import INFINITY, divided, kept_by_min_p, weight_of

# The distance of the second bound below the first if `read` had no pivots, in standard deviations of the sample.
NEXT_BOUND = tl.constexpr(0.6)


@triton.jit(do_not_specialize=["vocab_size", "num_chunks", "programs", "given", "processed", "capacity"])
def reread(
    logits, logits_strides, vocab_size, num_chunks, programs, keys, given, settings, strides, processed,
    ints, floats, parts, part_ids, pivot_sums, listed_logits, listed_ids, capacity,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each row has `programs` programs. Each of them takes every `programs`-th chunk of the row."""
    num_rows = tl.num_programs(0) // programs
    row, first = tl.program_id(0) % num_rows, tl.program_id(0) // num_rows
    # `read` has waited for whatever wrote the arguments, so they can be loaded while it ends.
    scale, greedy, k, p, least = settings_of(row, given, settings, strides, vocab_size)
    pdl_wait(PDL)
    if (k == 0 and ((p < 1) != (least > 0))) and (processed != 0 or not greedy):
        parts += row * num_chunks * NUM_PARTS
        part_ids += row * num_chunks
        line = logits + row.to(tl.int64) * logits_strides[0]
        seed = tl.load(keys + row * strides[4])
        chunk = tl.arange(0, CHUNKS)
        tops = tl.load(parts + chunk * NUM_PARTS + CHUNK_MAX, chunk < num_chunks, -INFINITY)
        top_logit = tl.max(tops, 0)
        chunk_weight = weight_of(tops, top_logit, scale)
        number = tl.load(ints + row * NUM_INTS + LISTED)
        low = tl.load(floats + row * NUM_FLOATS + LOW)
        wanted, enough = 0.0, low == -INFINITY
        if p < 1:
            totals = tl.load(parts + chunk * NUM_PARTS + CHUNK_TOTAL, chunk < num_chunks, 0.0)
            listed = tl.load(parts + chunk * NUM_PARTS + CHUNK_LISTED, chunk < num_chunks, 0.0)
            wanted = p * tl.sum(totals * chunk_weight, 0)
            enough = enough or tl.sum(listed * chunk_weight, 0) >= wanted * (1 + SUM_ERROR)
        else:
            enough = enough or not kept_by_min_p(divided(low, scale), divided(top_logit, scale), least)
        if tl.load(ints + row * NUM_INTS + STRATEGY) == REJECTION:
            certain = tl.load(parts + chunk * NUM_PARTS + CHUNK_CERTAIN, chunk < num_chunks, 0.0)
            right = enough and tl.sum(certain * chunk_weight, 0) < wanted * (1 - SUM_ERROR) and number <= capacity
            scores = tl.load(parts + chunk * NUM_PARTS + CHUNK_SCORE, chunk < num_chunks, 0.0)
            rivals, bounds, num_rivals = _rivals(
                tl.max(scores * chunk_weight, 0), right,
                listed_logits + row.to(tl.int64) * capacity, listed_ids + row.to(tl.int64) * capacity, number,
                line, logits_strides[1], top_logit, scale, seed, vocab_size,
            )  # fmt: skip
            tl.store(ints + row * NUM_INTS + NUM_RIVALS, num_rivals)
            tl.store(ints + row * NUM_INTS + RIVALS + tl.arange(0, MOST_RIVALS), rivals)
            if not right:
                low = tl.load(floats + row * NUM_FLOATS + CLOSER_LOW)
                for current in range(first, num_chunks, programs):
                    _list_again(
                        low, line, logits_strides[1], current, vocab_size, scale,
                        parts + current * NUM_PARTS, pivot_sums + (row * num_chunks + current) * NUM_PIVOTS,
                        ints + row * NUM_INTS + RELISTED, listed_logits, listed_ids, row, capacity, CHUNK,
                    )  # fmt: skip
            elif num_rivals > 0:
                for current in range(first, num_chunks, programs):
                    _sum_before(
                        rivals, bounds, num_rivals, line, logits_strides[1], current, vocab_size, scale,
                        parts + current * NUM_PARTS, pivot_sums + (row * num_chunks + current) * NUM_PIVOTS, CHUNK,
                    )  # fmt: skip
        elif not enough or number > capacity:
            if processed == 0:
                tl.store(ints + row * NUM_INTS + STRATEGY, tl.where(p < 1, LATE_REJECTION, SAMPLED))
                for current in range(first, num_chunks, programs):
                    _sample(
                        line, logits_strides[1], current, vocab_size, low, least, top_logit, scale, seed,
                        floats + row * NUM_FLOATS, parts + current * NUM_PARTS, part_ids + current,
                        ints + row * NUM_INTS + RELISTED, listed_logits, listed_ids, row, capacity, CHUNK,
                    )  # fmt: skip
            else:
                low, high = _closer_bounds(
                    floats + row * NUM_FLOATS, pivot_sums + row * num_chunks * NUM_PIVOTS, chunk_weight, wanted,
                    enough, low, least, top_logit, scale, num_chunks, CHUNKS,
                )  # fmt: skip
                tl.store(ints + row * NUM_INTS + STRATEGY, SEARCH_CLOSER_LIST)
                tl.store(floats + row * NUM_FLOATS + CLOSER_LOW, low)
                tl.store(floats + row * NUM_FLOATS + CLOSER_HIGH, high)
                for current in range(first, num_chunks, programs):
                    _read_between(
                        line, logits_strides[1], current, vocab_size, low, high, scale, greedy, seed,
                        parts + current * NUM_PARTS, part_ids + current,
                        ints + row * NUM_INTS + RELISTED, listed_logits, listed_ids, row, capacity, CHUNK,
                    )  # fmt: skip


@triton.jit
def _rivals(score, right, listed_logits, listed_ids, number, line, column_stride, top, scale, seed, vocab_size):
    """The listed tokens with a score above `score`: each is the best of those before the previous one.

    Returns the tokens, their x, and how many they are, or −1 if the bounds are not right.
    """
    place = tl.arange(0, MOST_RIVALS)
    rivals, bounds = tl.zeros((MOST_RIVALS,), tl.int32), tl.zeros((MOST_RIVALS,), tl.float32)
    num_rivals = -1
    if right:
        num_rivals = 0
        rival, bound, more = vocab_size, -INFINITY, True
        while more:
            best, rival = best_listed(
                bound, rival, 0.0, listed_logits, listed_ids, number, top, scale, seed, vocab_size, ARGMAX_BLOCK
            )
            more = best > score
            if more:
                bound = x_of_token(rival, line, column_stride, scale, vocab_size)
                rivals = tl.where(place == num_rivals, rival, rivals)
                bounds = tl.where(place == num_rivals, bound, bounds)
                num_rivals += 1
                more = num_rivals < MOST_RIVALS
    return rivals, bounds, num_rivals


@triton.jit
def _sum_before(
    rivals, bounds, num_rivals, line, column_stride, chunk, vocab_size, scale, part, sums, CHUNK: tl.constexpr
):
    """Sums the weights of the tokens of a chunk before each rival."""
    place = tl.arange(0, MOST_RIVALS)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(line + token.to(tl.int64) * column_stride, token < vocab_size, -INFINITY).to(tl.float32)
    weight, x = weight_of(logit, tl.load(part + CHUNK_MAX), scale), divided(logit, scale)
    for current in range(0, num_rivals):
        rival = tl.sum(tl.where(place == current, rivals, 0), 0)
        bound = tl.sum(tl.where(place == current, bounds, 0.0), 0)
        tl.store(sums + current, tl.sum(tl.where(precedes(x, token, bound, rival), weight, 0.0), 0))


@triton.jit
def _list_again(
    low, line, column_stride, chunk, vocab_size, scale, part, sums,
    relisted, listed_logits, listed_ids, row, capacity, CHUNK: tl.constexpr,
):  # fmt: skip
    """Lists the tokens of a chunk from `low` on, and sums their weights. The bounds for rejection were wrong."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(line + token.to(tl.int64) * column_stride, token < vocab_size, -INFINITY).to(tl.float32)
    among = (logit >= low) & (logit > -INFINITY)
    list_candidates(logit, token, among, relisted, listed_logits, listed_ids, row, capacity, True)
    tl.store(sums, tl.sum(tl.where(among, weight_of(logit, tl.load(part + CHUNK_MAX), scale), 0.0), 0))


@triton.jit
def _sample(
    line, column_stride, chunk, vocab_size, low, least, row_top, scale, seed,
    bounds, part, part_id, relisted, listed_logits, listed_ids, row, capacity, CHUNK: tl.constexpr,
):  # fmt: skip
    """Samples a chunk among the tokens that min-p keeps or, without it, from `low` on, and then lists rivals too."""
    top = tl.load(part + CHUNK_MAX)
    score, sampled = 0.0, vocab_size
    if least > 0:
        if kept_by_min_p(divided(top, scale), divided(row_top, scale), least):
            score, sampled = _argmax_by_min_p(
                line, column_stride, chunk * CHUNK, least, divided(row_top, scale), top, scale, seed, vocab_size, CHUNK
            )
    else:
        score, sampled = chunk_argmax(
            line, column_stride, chunk * CHUNK, -INFINITY, low, least_score_of(bounds, top, scale), top, scale, seed,
            vocab_size, relisted, listed_logits, listed_ids, row, capacity, True, CHUNK,
        )  # fmt: skip
    tl.store(part + CHUNK_SCORE, score)
    tl.store(part_id, sampled)


@triton.jit
def _argmax_by_min_p(line, column_stride, first, least, row_top, top, scale, seed, vocab_size, CHUNK: tl.constexpr):
    """The best score and the sampled token of the tokens of a chunk that min-p keeps."""
    best_weight, best_noise, best_token = empty_argmax(vocab_size, ARGMAX_BLOCK)
    for place in range(first, first + CHUNK, ARGMAX_BLOCK):
        token = place + tl.arange(0, ARGMAX_BLOCK)
        logit = tl.load(line + token.to(tl.int64) * column_stride, token < vocab_size, -INFINITY).to(tl.float32)
        kept = kept_by_min_p(divided(logit, scale), row_top, least)
        best_weight, best_noise, best_token = update_argmax(
            best_weight, best_noise, best_token, tl.where(kept, weight_of(logit, top, scale), 0.0),
            noise_of_block(seed, tl.arange(0, ARGMAX_BLOCK // WORDS) + place // WORDS), token,
        )  # fmt: skip
    return reduce_argmax(best_weight / best_noise, best_token, vocab_size)


@triton.jit
def _closer_bounds(
    bounds, pivot_sums, chunk_weight, wanted, enough, low, least, top, scale, num_chunks, CHUNKS: tl.constexpr
):  # fmt: skip
    """Two logits around the cut-off: tokens below the first are dropped, tokens at or above the second are kept.

    chunk_weight: for each chunk, the weight of its largest logit as a multiple of the row's largest weight.

    wanted: the weight that top-p keeps. enough: whether the cut-off is at or above `low`. least: min-p, or 0.
    """
    closer, high = tl.where(enough, low, -INFINITY), tl.where(enough, INFINITY, low)
    if least > 0:  # min-p's cut-off follows from the largest logit
        cut = top + tl.log(least) * scale
        margin = (tl.abs(cut) + tl.abs(top)) * 1e-5 + 1e-30
        closer, high = cut - margin, cut + margin
    elif tl.load(bounds + ESTIMATE) < INFINITY:
        chunk, pivot = tl.arange(0, CHUNKS)[:, None], tl.arange(0, NUM_PIVOTS)[None, :]
        sums = tl.load(pivot_sums + chunk * NUM_PIVOTS + pivot, chunk < num_chunks, 0.0)
        sums = tl.sum(sums * chunk_weight[:, None], 0)
        value = pivots_of(bounds)
        closer = max(closer, tl.max(tl.where(sums >= wanted, value, -INFINITY), 0))
        high = min(high, tl.min(tl.where(sums >= wanted, INFINITY, value), 0))
    elif not enough:
        closer = low - NEXT_BOUND * tl.load(bounds + DEVIATION)
    return closer, high


@triton.jit
def _read_between(
    line, column_stride, chunk, vocab_size, low, high, scale, greedy, seed,
    part, part_id, relisted, listed_logits, listed_ids, row, capacity, CHUNK: tl.constexpr,
):  # fmt: skip
    """Lists candidates of a chunk and samples among its certain tokens like `read`, and sums the weights of these."""
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(line + place.to(tl.int64) * column_stride, place < vocab_size, -INFINITY).to(tl.float32)
    among = (logit >= low) & (logit < high) & (logit > -INFINITY)
    list_candidates(logit, place, among, relisted, listed_logits, listed_ids, row, capacity, True)
    top = tl.load(part + CHUNK_MAX)
    certain, score, sampled = 0.0, 0.0, vocab_size
    if top >= high:
        certain = tl.sum(tl.where(logit >= high, weight_of(logit, top, scale), 0.0), 0)
        if not greedy:
            score, sampled = chunk_argmax(
                line, column_stride, chunk * CHUNK, low, high, 0.0, top, scale, seed, vocab_size,
                relisted, listed_logits, listed_ids, row, capacity, False, CHUNK,
            )  # fmt: skip
    tl.store(part + CHUNK_CERTAIN, certain)
    if not greedy:
        tl.store(part + CHUNK_SCORE, score)
        tl.store(part_id, sampled)
