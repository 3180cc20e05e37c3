"""paged_attention: softmax attention of the step's query tokens over the paged KV cache.

Semantics: vLLM's `unified_attention` (v1/attention/ops/triton_unified_attention.py), with a window on both sides as in
its FlashAttention backend, attention sinks as in gpt-oss, soft cap as in Gemma 2.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops._strides import check_contiguous
from vllm_opset.ops.attention import _paged_draws
from vllm_opset.ops.attention._paged_cases import CASES
from vllm_opset.ops.attention._paged_inputs import UNTOUCHED, PagedCase, bench_samples, packed_sample
from vllm_opset.ops.attention.paged_batch import PagedBatch, keys_and_values, window_sides
from vllm_opset.ops.contract import Cost, Problem, Sample, Tolerance, accumulator, op

# atol: fused kernels round the weights of the softmax to the dtype of the values before the second product. Each weight
# is then off by up to half a unit in its last place. The errors of different keys are independent, so the error of the
# sum is the same share of the output's root mean square, which is the `scale` of a sample. The bound is 8 standard
# deviations of it. rtol: the rounding of the output itself.
TOLERANCES = {
    torch.float64: Tolerance(1e-11, 1e-11, "fp64 throughout"),
    torch.float32: Tolerance(2e-5, 2e-5, "scores of up to 100, their exp and all sums in fp32, in another order"),
    torch.bfloat16: Tolerance(2**-7, 2**-6, "weights and output rounded to 8 bits of mantissa"),
    torch.float16: Tolerance(2**-10, 2**-9, "weights and output rounded to 11 bits of mantissa"),
}

# The number of query rows that the reference handles at a time. It bounds the memory for scores and changes no result.
REFERENCE_ROWS = 1024


@dataclass(frozen=True)
class PagedAttentionProblem(Problem):
    """The facts that are known when the cache of a layer is laid out.

    dtype: dtype of query and out. soft_cap, alibi, sinks: whether the layer uses them.

    split_kv_layout: whether keys and values have a dimension of their own in the cache: [..., 2, head_size].

    Raises ValueError if num_heads is not a multiple of num_kv_heads, or if the window holds no key.
    """

    kv_cache_dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    window: int | tuple[int, int] | None = None
    soft_cap: bool = False
    alibi: bool = False
    sinks: bool = False
    causal: bool = True
    split_kv_layout: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly")
        window_sides(self.window, self.causal)


@op(problem=PagedAttentionProblem, mutates=("out",), tolerances=TOLERANCES)
def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: PagedBatch,
    out: torch.Tensor,
    *,
    scale: float,
    window: int | tuple[int, int] | None = None,
    soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """out = softmax(mask(cap(scale * query · key) + bias)) · value over a request's keys, in fp32 and rounded once.

    query, out: [T, num_heads, head_size], any strides. Rows from batch.query_start_loc[-1] on are neither read nor
    written. `paged_batch` describes kv_cache and batch. num_heads is a multiple g of num_kv_heads: query head i reads
    KV head i // g.

    Query i of a request is at position seq_len − query_len + i, key j at position j. The query sees the keys within
    `window` (see `window_sides`). If batch.causal, it sees no key after its own position. query_len may exceed seq_len
    only if the batch is not causal and there is no window.

    scale: above zero, so that the largest product has the largest score.

    soft_cap: cap(s) = soft_cap * tanh(s / soft_cap), 0 for none.

    alibi_slopes: fp32 [num_heads]; the bias is slope * (key position − query position).

    sinks: [num_heads], one more logit in each head's softmax, whose value is zero. Both are contiguous.

    k_scale, v_scale: fp32, one element; cached keys and values are multiplied by them. They are for fp8 caches.

    A query of a request without keys gives zeros, as in vLLM's and PyTorch's kernels, because a NaN would spread.
    Memory that no query of a request sees may hold NaN: pages beyond the sequence or before the window, slots of the
    last page after the end of the sequence, and unused pages. Raises ValueError if shapes or strides do not fit, or if
    the scale is not above zero.
    """
    check_inputs(query, kv_cache, out, scale, alibi_slopes, sinks)
    sides = window_sides(window, batch.causal)
    starts = batch.query_start_loc.tolist()
    for request, seq_len in enumerate(batch.seq_lens.tolist()):
        start, stop = starts[request : request + 2]
        key, value = _cached(kv_cache, batch.block_table[request], seq_len, accumulator(query), k_scale, v_scale)
        for first in range(start, stop, REFERENCE_ROWS):
            rows = slice(first, min(first + REFERENCE_ROWS, stop))
            positions = torch.arange(rows.start, rows.stop, device=query.device) - stop + seq_len
            out[rows] = _attend(query[rows], key, value, positions, sides, scale, soft_cap, alibi_slopes, sinks)


def _cached(
    kv_cache: torch.Tensor, pages: torch.Tensor, seq_len: int, dtype: torch.dtype, k_scale, v_scale
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of one request, [seq_len, num_kv_heads, head_size] each."""
    block_size = kv_cache.shape[2]
    position = torch.arange(seq_len, device=kv_cache.device)
    place = pages[position // block_size].long(), slice(None), position % block_size
    key, value = (half[place].to(dtype) for half in keys_and_values(kv_cache))
    return key if k_scale is None else key * k_scale, value if v_scale is None else value * v_scale


def _attend(query, key, value, positions, sides, scale, soft_cap, alibi_slopes, sinks) -> torch.Tensor:
    """The attention of some query rows of one request, [rows, num_heads, head_size], over all keys of that request."""
    num_rows, num_heads, head_size = query.shape
    num_keys, num_kv_heads, _ = key.shape
    distance = torch.arange(num_keys, device=key.device) - positions[:, None]
    visible = _visible(distance, sides)
    unseen = ~visible.any(dim=0)[:, None, None]
    key, value = key.masked_fill(unseen, 0), value.masked_fill(unseen, 0)

    grouped = query.to(key.dtype).view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_size)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, key).flatten(0, 1) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.to(scores.dtype)[:, None, None] * distance
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(-1, num_rows, 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(dim=-1)[..., :num_keys].unflatten(0, (num_kv_heads, -1))
    return torch.einsum("hgqk,khd->qhgd", weights, value).reshape(query.shape).to(query.dtype)


def _visible(distance: torch.Tensor, sides: tuple[int | None, int | None]) -> torch.Tensor:
    """Which keys a query sees, elementwise. distance: key position − query position."""
    left, right = sides
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    return visible


def check_inputs(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """Raises ValueError if shapes, dtypes or strides do not fit, or if the scale is not above zero."""
    if scale <= 0:
        raise ValueError(f"a scale of {scale}: it must be above zero")
    num_heads, head_size = query.shape[1:]
    if out.shape != query.shape or out.dtype != query.dtype:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, query {query.dtype} {tuple(query.shape)}")
    if kv_cache.shape[3:].numel() != 2 * head_size:
        raise ValueError(
            f"a cache row of {kv_cache.shape[3:].numel()} does not hold key and value of head size {head_size}"
        )
    if num_heads % kv_cache.shape[1]:
        raise ValueError(f"{num_heads} query heads cannot share {kv_cache.shape[1]} KV heads evenly")
    for name, per_head in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if per_head is not None and per_head.shape != (num_heads,):
            raise ValueError(f"{name} has shape {tuple(per_head.shape)} for {num_heads} heads")
    check_contiguous(alibi_slopes=alibi_slopes, sinks=sinks)


@paged_attention.problem_of
def _(
    query, kv_cache, batch, out, *, window=None, soft_cap=0.0, alibi_slopes=None, sinks=None, **_
) -> PagedAttentionProblem:
    return PagedAttentionProblem(
        device=query.device.type,
        dtype=query.dtype,
        kv_cache_dtype=kv_cache.dtype,
        num_heads=query.shape[1],
        num_kv_heads=kv_cache.shape[1],
        head_size=query.shape[2],
        block_size=kv_cache.shape[2],
        window=window,
        soft_cap=soft_cap > 0,
        alibi=alibi_slopes is not None,
        sinks=sinks is not None,
        causal=batch.causal,
        split_kv_layout=kv_cache.dim() == 5,
    )


@paged_attention.cost
def _(query, kv_cache, batch, out, *, window=None, **_) -> Cost:
    """Moves query, output, and each key and value that some query sees once. Two products for each visible pair."""
    left, right = window_sides(window, batch.causal)
    query_lens, seq_lens = batch.query_start_loc.diff().long(), batch.seq_lens.long()
    request = torch.repeat_interleave(query_lens)
    position = torch.arange(len(request), device=request.device) - batch.query_start_loc[request]
    position += (seq_lens - query_lens)[request]
    first = torch.zeros_like(position) if left is None else (position - left).clamp(min=0)
    last = seq_lens[request] - 1
    last = last if right is None else torch.minimum(last, position + right)
    pairs = int((last - first + 1).sum())
    keys = seq_lens if left is None else torch.minimum(seq_lens, query_lens + left)
    _, num_heads, head_size = query.shape
    num_kv_heads, row_bytes = kv_cache.shape[1], kv_cache.shape[3:].numel() * kv_cache.element_size()
    token_bytes = num_heads * head_size * (query.element_size() + out.element_size())
    return Cost(
        bytes=len(request) * token_bytes + int(keys[query_lens > 0].sum()) * num_kv_heads * row_bytes,
        flops=4 * head_size * num_heads * pairs,
    )


@paged_attention.sample_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    for name, case in CASES.items():
        yield case.sample(name, device, dtype)
    yield packed_sample(device, dtype)


@paged_attention.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    case = PagedCase(((1, 20), (3, 9)))

    def sample(name: str, **changes) -> Sample:
        def make():
            inputs, options = case.make("illegal", device, dtype)
            bound = paged_attention.signature.bind(*inputs, **options).arguments
            for parameter, change in changes.items():
                bound[parameter] = change(bound)
            return (), bound

        return Sample(name, make)

    another = torch.float16 if dtype == torch.float32 else torch.float32  # not fp64, which some devices make fp32
    yield sample("out of another dtype", out=lambda given: given["out"].to(another))
    yield sample("out of other heads", out=lambda given: given["out"][:, :2])
    yield sample("a cache of another head size", kv_cache=lambda given: given["kv_cache"][..., :32])
    yield sample(
        "KV heads that cannot share the query heads", kv_cache=lambda given: torch.cat([given["kv_cache"]] * 3, dim=1)
    )
    yield sample("one slope for all heads", alibi_slopes=lambda given: torch.ones(1, device=device))
    yield sample("one sink for all heads", sinks=lambda given: torch.ones(1, device=device))
    yield sample("strided slopes", alibi_slopes=lambda given: torch.ones(8, device=device)[::2])
    yield sample("strided sinks", sinks=lambda given: torch.ones(8, device=device)[::2])
    yield sample("an empty window", window=lambda given: 0)
    yield sample("a negative window", window=lambda given: (-2, 0))
    yield sample("a scale of zero", scale=lambda given: 0.0)
    yield sample("a negative scale", scale=lambda given: -0.125)


@paged_attention.bench_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    yield from bench_samples(device, dtype)


paged_attention.random_input(_paged_draws.draw)


def _run(run, query, kv_cache, batch: PagedBatch, **options) -> torch.Tensor:
    out = torch.full_like(query, UNTOUCHED)
    run(query, kv_cache, batch, out, scale=query.shape[-1] ** -0.5, **options)
    return out


def _assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compares two results of one kernel. Each of them may be off by the tolerance."""
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(got, want, rtol=2 * tolerance.rtol, atol=2 * tolerance.atol)


MIXED = PagedCase(((1, 77), (19, 19), (6, 50), (1, 34)))
# If a kernel splits the keys among few programs, two of them share the long request.
DECODE = PagedCase(((1, 34), (1, 300), (1, 130)))


@paged_attention.property_
def any_chunking_of_a_prompt_equals_one_pass(run, device: str, dtype: torch.dtype) -> None:
    (query, kv_cache, batch, _), _ = PagedCase(((90, 90),)).make("chunks", device, dtype)
    whole = _run(run, query, kv_cache, batch)
    stop = 0
    for length in (1, 16, 30, 1, 42):
        start, stop = stop, stop + length
        chunk = PagedCase(((length, stop),)).batch(batch.block_table)
        _assert_close(_run(run, query[start:stop], kv_cache, chunk), whole[start:stop])


@paged_attention.property_
def any_permutation_of_pages_gives_the_same_bits(run, device: str, dtype: torch.dtype) -> None:
    rng = _samples.generator("permutation")
    query, tokens = MIXED.query(rng, device, dtype), MIXED.tokens(rng, device, dtype)
    first, second = (MIXED.cache(tokens, _samples.generator(seed)) for seed in ("one order", "another"))
    assert not torch.equal(first[1], second[1]), "the pages are where they were"
    results = [_run(run, query, kv_cache, MIXED.batch(block_table)) for kv_cache, block_table in (first, second)]
    _properties.equal("another order of the pages changes the result", *results)


@paged_attention.property_
def a_window_is_a_pair_to_the_bit(run, device: str, dtype: torch.dtype) -> None:
    (query, kv_cache, batch, _), _ = MIXED.make("pair", device, dtype)
    number, pair = (_run(run, query, kv_cache, batch, window=window) for window in (21, (20, 0)))
    _properties.equal("a window of 21 is not one of (20, 0)", number, pair)


@paged_attention.property_
def a_request_does_not_depend_on_its_batch(run, device: str, dtype: torch.dtype) -> None:
    (query, kv_cache, batch, _), _ = MIXED.make("alone", device, dtype)
    together = _run(run, query, kv_cache, batch)
    stop = 0
    for row, request in enumerate(MIXED.requests):
        start, stop = stop, stop + request[0]
        alone = PagedCase((request,)).batch(batch.block_table[row : row + 1])
        _assert_close(_run(run, query[start:stop], kv_cache, alone), together[start:stop])


@paged_attention.property_
def what_no_query_sees_changes_no_bit(run, device: str, dtype: torch.dtype) -> None:
    case = PagedCase(MIXED.requests, window=20)
    (query, kv_cache, batch, _), _ = case.make("unseen", device, dtype)
    clean = kv_cache.nan_to_num(nan=1000.0)
    results = (_run(run, query, cache, batch, window=20) for cache in (kv_cache, clean))
    _properties.equal("what no query sees changes the result", *results)


@paged_attention.property_
def layers_of_all_kinds_share_a_batch(run, device: str, dtype: torch.dtype) -> None:
    """A layer keeps state in the batch. It must not mislead layers with other strides, heads, windows or features."""
    _assert_layers_share(run, device, dtype, MIXED, (2, "HND"), (2, "NHD, layers interleaved"), (4, "HND"))
    _assert_layers_share(run, device, dtype, DECODE, (2, "HND"))


def _assert_layers_share(run, device: str, dtype: torch.dtype, case: PagedCase, *shapes: tuple[int, str]) -> None:
    """Asserts that layers of these shapes can share a batch. shapes: pairs of the number of KV heads and the layout."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    layers = [
        (PagedCase(case.requests, num_kv_heads=kv_heads, layout=layout), options)
        for kv_heads, layout in shapes
        for options in ({}, {"window": 20}, {"soft_cap": 1.5}, {"alibi_slopes": slopes}, {"alibi_slopes": slopes / 2})
    ]
    shared = None
    for case, options in layers:
        (query, kv_cache, batch, _), _ = case.make("shared", device, dtype)
        shared = shared or batch
        assert torch.equal(shared.block_table, batch.block_table), "the layers do not have the same pages"
        expected = _run(run, query, kv_cache, batch, **options)
        got = _run(run, query, kv_cache, shared, **options)
        _properties.equal(f"another layer changes this one, {case.layout} {options}", got, expected)


@paged_attention.property_
def lengths_on_the_host_change_no_bit(run, device: str, dtype: torch.dtype) -> None:
    (query, kv_cache, batch, _), _ = MIXED.make("host", device, dtype)
    on_host = {f"{name}_cpu": getattr(batch, name).cpu() for name in ("query_start_loc", "seq_lens")}
    known = dataclasses.replace(batch, **on_host)
    results = (_run(run, query, kv_cache, lengths) for lengths in (batch, known))
    _properties.equal("lengths on the host change the result", *results)


@paged_attention.property_
def the_batch_stays_as_it_is(run, device: str, dtype: torch.dtype) -> None:
    (query, kv_cache, batch, _), _ = MIXED.make("batch", device, dtype)
    tensors = (batch.query_start_loc, batch.seq_lens, batch.block_table)
    before = [tensor.clone() for tensor in tensors]
    _run(run, query, kv_cache, batch)
    for now, then in zip(tensors, before, strict=True):
        _properties.equal("the batch is not as it was", now, then)
