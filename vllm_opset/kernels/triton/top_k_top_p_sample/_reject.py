"""Device code of `finish` that samples by rejection: it finds the best kept token without the cut-off of top-p.

A token is sampled by an exponential argmax. If top-p drops it, the best of the tokens before it is tried.
"""

import triton
import triton.language as tl

from vllm_opset.kernels.triton.top_k_top_p_sample._noise import (
    WORDS,
    noise_of_block,
)
from vllm_opset.kernels.triton.top_k_top_p_sample._rows import (
    ARGMAX_BLOCK,
    MOST_RIVALS,
    NUM_PIVOTS,
    NUM_RIVALS,
    RIVALS,
    SUM_ERROR,
    best_listed,
    empty_argmax,
    precedes,
    reduce_argmax,
    update_argmax,
    x_of_token,
)
from vllm_opset.kernels.triton.top_k_top_p_sample._search import (
    FEW,
    INFINITY,
    ITEMS,
    LOG2E,
    LOWEST_KEY,
    RUN,
    divided,
    in_fixed_point,
    kth_key_of_few,
    reached_at,
    search,
    value_of,
    weight_of,
)

SUM_BLOCK = tl.constexpr(4096)  # tokens of one step of a sum over a row


@triton.jit
def best_kept_rival(
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
def reject_late(
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
def sample_listed(
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
    return reject_listed(
        goal, p, least, floor, number, listed_logits, listed_ids,
        line, column_stride, top, scale, seed, vocab_size,
    )  # fmt: skip


@triton.jit
def reject_listed(
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
