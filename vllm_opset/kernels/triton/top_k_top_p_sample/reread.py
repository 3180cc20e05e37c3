"""The kernel `reread` of top_k_top_p_sample: reads rows again if one read is not enough.

`read` describes how the kernels work together. This kernel handles rows that only top-p or only min-p filters:

- In a row of which `read` sampled a token, it sums the weights before this token, which decide whether top-p keeps it.
  It also samples among the tokens before it, because the second token is the result if top-p drops the first.

- In a row whose list of candidates misses the cut-off, it samples among all tokens if the call asks only for tokens and
  the filter is top-p.

- In any other row whose list misses the cut-off, it makes a list between closer bounds, which follow from the sums of
  `read`.

If the list of a row is sufficient, the row costs only a few loads.
"""

import triton
import triton.language as tl

from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton.top_k_top_p_sample._rows import (
    CHUNK_CERTAIN,
    CHUNK_LISTED,
    CHUNK_MAX,
    CHUNK_SCORE,
    CHUNK_SECOND,
    CHUNK_TOTAL,
    CLOSER_HIGH,
    CLOSER_LOW,
    DEVIATION,
    ESTIMATE,
    LATE_REJECTION,
    LISTED,
    LOW,
    NUM_FLOATS,
    NUM_INTS,
    NUM_PARTS,
    NUM_PIVOTS,
    NUM_SAMPLED,
    REJECTION,
    RELISTED,
    SEARCH_CLOSER_LIST,
    STRATEGY,
    SUM_ERROR,
    chunk_argmax,
    list_candidates,
    pivots_of,
    precedes,
    reduce_argmax,
    settings_of,
)
from vllm_opset.kernels.triton.top_k_top_p_sample._search import INFINITY, LOG2E, divided, weight_of

# The distance of the second bound below the first if `read` had no pivots, in standard deviations of the sample.
NEXT_BOUND = tl.constexpr(0.6)


@triton.jit(do_not_specialize=["vocab_size", "num_chunks", "programs", "given", "processed", "capacity"])
def reread(
    logits, logits_strides, vocab_size, num_chunks, programs, keys, given, settings, strides, processed,
    ints, floats, parts, part_ids, pivot_sums, listed_logits, listed_ids, capacity,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each row has `programs` programs. Each of them takes every `programs`-th chunk of the row."""
    pdl_wait(PDL)
    num_rows = tl.num_programs(0) // programs
    row, first = tl.program_id(0) % num_rows, tl.program_id(0) // num_rows
    scale, greedy, k, p, least = settings_of(row, given, settings, strides, vocab_size)
    if (k == 0 and ((p < 1) != (least > 0))) and (processed != 0 or not greedy):
        parts += row * num_chunks * NUM_PARTS
        part_ids += row * num_chunks * NUM_SAMPLED
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
            enough = enough or tl.exp2((divided(low, scale) - divided(top_logit, scale)) * LOG2E) < least
        if tl.load(ints + row * NUM_INTS + STRATEGY) == REJECTION:
            if enough:
                scores = tl.load(parts + chunk * NUM_PARTS + CHUNK_SCORE, chunk < num_chunks, -INFINITY)
                tokens_of_chunks = tl.load(part_ids + chunk * NUM_SAMPLED, chunk < num_chunks, vocab_size)
                _, sampled = reduce_argmax(scores * chunk_weight, tokens_of_chunks, vocab_size)
                bound = tl.load(line + sampled.to(tl.int64) * logits_strides[1], sampled < vocab_size, INFINITY)
                _argmax_before(
                    first, programs, line, logits_strides[1], vocab_size, num_chunks,
                    divided(bound.to(tl.float32), scale), sampled, scale, seed, parts, part_ids, CHUNK,
                )  # fmt: skip
        elif not enough or number > capacity:
            if p < 1 and processed == 0:
                tl.store(ints + row * NUM_INTS + STRATEGY, LATE_REJECTION)
                _argmax_all(
                    first, programs, line, logits_strides[1], vocab_size, num_chunks, scale, seed, parts, part_ids,
                    CHUNK,
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
                        parts + current * NUM_PARTS, part_ids + current * NUM_SAMPLED,
                        ints + row * NUM_INTS + RELISTED, listed_logits, listed_ids, row, capacity, CHUNK,
                    )  # fmt: skip


@triton.jit
def _argmax_before(
    first, programs, line, column_stride, vocab_size, num_chunks, bound, sampled, scale, seed, parts, part_ids,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Sums the weights of the tokens before `sampled`, and samples among these. bound: x of `sampled`."""
    for chunk in range(first, num_chunks, programs):
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        logit = tl.load(line + token.to(tl.int64) * column_stride, token < vocab_size, -INFINITY).to(tl.float32)
        before = precedes(divided(logit, scale), token, bound, sampled)
        top = tl.load(parts + chunk * NUM_PARTS + CHUNK_MAX)
        weight = tl.sum(tl.where(before, weight_of(logit, top, scale), 0.0), 0)
        tl.store(parts + chunk * NUM_PARTS + CHUNK_CERTAIN, weight)
        score, second = -INFINITY, vocab_size
        if weight > 0:
            score, second = chunk_argmax(
                line, column_stride, chunk * CHUNK, bound, sampled, top, scale, seed, vocab_size, True, CHUNK
            )
        tl.store(parts + chunk * NUM_PARTS + CHUNK_SECOND, score)
        tl.store(part_ids + chunk * NUM_SAMPLED + 1, second)


@triton.jit
def _argmax_all(
    first, programs, line, column_stride, vocab_size, num_chunks, scale, seed, parts, part_ids, CHUNK: tl.constexpr
):
    for chunk in range(first, num_chunks, programs):
        top = tl.load(parts + chunk * NUM_PARTS + CHUNK_MAX)
        score, sampled = -INFINITY, vocab_size
        if top > -INFINITY:
            score, sampled = chunk_argmax(
                line, column_stride, chunk * CHUNK, -INFINITY, vocab_size, top, scale, seed, vocab_size, False, CHUNK
            )
        tl.store(parts + chunk * NUM_PARTS + CHUNK_SCORE, score)
        tl.store(part_ids + chunk * NUM_SAMPLED, sampled)


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
    list_candidates(logit, place, among, relisted, listed_logits, listed_ids, row, capacity)
    top = tl.load(part + CHUNK_MAX)
    certain, score, sampled = 0.0, -INFINITY, vocab_size
    if top >= high:
        certain = tl.sum(tl.where(logit >= high, weight_of(logit, top, scale), 0.0), 0)
        if not greedy:
            score, sampled = chunk_argmax(
                line, column_stride, chunk * CHUNK, high, vocab_size, top, scale, seed, vocab_size, False, CHUNK
            )
    tl.store(part + CHUNK_CERTAIN, certain)
    if not greedy:
        tl.store(part + CHUNK_SCORE, score)
        tl.store(part_id, sampled)
