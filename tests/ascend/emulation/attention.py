"""Attention: fused infer attention, packed or over a paged cache, and ATB's paged attention for decoding.

Computed in fp32 and rounded once. A key that no query sees is not read, and a query that sees no key gives NaN: the
documents promise neither, so nothing may rest on the second, and nothing is shown about the first.
"""

import math
from collections.abc import Iterator

import torch

from emulation.registry import emulates, require, require_contiguous, require_dtype

UNLIMITED = 2**31 - 1
COMPRESSED_MASK = (2048, 2048)
LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND = 2, 3, 4


@emulates("npu::npu_fused_infer_attention_score")
def npu_fused_infer_attention_score(
    query, key, value, *, atten_mask=None, actual_seq_lengths=None, actual_seq_lengths_kv=None, block_table=None,
    num_heads=1, scale=1.0, pre_tokens=UNLIMITED, next_tokens=UNLIMITED, input_layout="BSH", num_key_value_heads=0,
    sparse_mode=0, inner_precise=0, block_size=0, softmax_lse_flag=False, **others,
):  # fmt: skip
    return fused(
        query, key, value, atten_mask, actual_seq_lengths, actual_seq_lengths_kv, block_table, num_heads, scale,
        pre_tokens, next_tokens, input_layout, num_key_value_heads, sparse_mode, block_size, softmax_lse_flag, None,
        others,
    )  # fmt: skip


@emulates("npu::npu_fused_infer_attention_score_v2")
def npu_fused_infer_attention_score_v2(
    query, key, value, *, atten_mask=None, actual_seq_qlen=None, actual_seq_kvlen=None, block_table=None,
    learnable_sink=None, num_query_heads=1, num_key_value_heads=0, softmax_scale=1.0, pre_tokens=UNLIMITED,
    next_tokens=UNLIMITED, input_layout="BSH", sparse_mode=0, block_size=0, inner_precise=0, return_softmax_lse=False,
    **others,
):  # fmt: skip
    return fused(
        query, key, value, atten_mask, actual_seq_qlen, actual_seq_kvlen, block_table, num_query_heads, softmax_scale,
        pre_tokens, next_tokens, input_layout, num_key_value_heads, sparse_mode, block_size, return_softmax_lse,
        learnable_sink, others,
    )  # fmt: skip


def fused(
    query, key, value, mask, query_ends, kv_lens, block_table, num_heads, scale, pre_tokens, next_tokens, layout,
    num_kv_heads, sparse_mode, block_size, with_lse, sink, others,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The two versions differ in their names alone."""
    if layout != "TND" or with_lse or any(value for value in others.values()):
        raise NotImplementedError(f"only layout TND is emulated, without log-sum-exp, rope and quantisation: {others}")
    check(query, key, value, mask, query_ends, kv_lens, num_heads, num_kv_heads or num_heads, sparse_mode)
    if block_table is not None:
        check_pages(key, value, block_table, query_ends, kv_lens, num_kv_heads or num_heads, block_size)
        pages = paged(key, value, block_table, kv_lens, num_kv_heads or num_heads)
    else:
        require(kv_lens[-1] == len(key) == len(value), "the last of actual_seq_lengths_kv is the number of keys")
        pages = ((key[start:end], value[start:end]) for start, end in ranges(kv_lens))
    out = torch.empty_like(query)
    for (start, end), (keys, values) in zip(ranges(query_ends), pages, strict=True):
        visible = seen(end - start, len(keys), mask, sparse_mode, pre_tokens, next_tokens)
        out[start:end] = attend(query[start:end], keys, values, visible, scale, sink)
    return out, torch.empty(0)


def ranges(ends: list[int]) -> Iterator[tuple[int, int]]:
    return zip([0, *ends[:-1]], ends, strict=True)


def paged(key, value, block_table, lens, num_kv_heads) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [len, heads, size] of each request. The caches are [num_blocks, block_size, heads * size]."""
    block_size = key.shape[1]
    for pages, num_keys in zip(block_table, lens, strict=True):
        pages = pages[: -(-num_keys // block_size)].long()
        yield tuple(
            cache[pages].flatten(0, 1)[:num_keys].unflatten(-1, (num_kv_heads, -1)) if cache.dim() == 3
            else cache[pages].flatten(0, 1)[:num_keys]
            for cache in (key, value)
        )  # fmt: skip


def seen(num_queries, num_keys, mask, sparse_mode, pre_tokens, next_tokens) -> torch.Tensor:
    """Which key each query sees. Only modes 0 and 4 look at pre_tokens and next_tokens; 0 without a mask at nothing."""
    query, key = torch.arange(num_queries).unsqueeze(1), torch.arange(num_keys)
    last = num_keys - num_queries  # the last query is at the last key
    if sparse_mode == 0:
        if mask is None:
            return torch.ones(num_queries, num_keys, dtype=torch.bool)
        near = (key >= query - pre_tokens) & (key <= query + next_tokens)
        return near & ~mask.reshape(mask.shape[-2:])[:num_queries, :num_keys].bool()
    if sparse_mode == LEFT_UP_CAUSAL:
        return key <= query
    if sparse_mode == RIGHT_DOWN_CAUSAL:
        return key <= query + last
    if sparse_mode == BAND:
        return (key >= query + last - pre_tokens) & (key <= query + last + next_tokens)
    raise NotImplementedError(f"sparse_mode {sparse_mode} is not emulated")


def attend(query, key, value, visible, scale, sink=None) -> torch.Tensor:
    """query: [n, heads, size]. key, value: [m, kv_heads, size]. visible: [n, m]."""
    groups = query.shape[1] // key.shape[1]
    unseen = ~visible.any(dim=0)[:, None, None]
    key, value = (x.float().masked_fill(unseen, 0).repeat_interleave(groups, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    scores = scores.masked_fill(~visible, -math.inf)
    if sink is not None:
        scores = torch.cat((scores, sink.float()[:, None, None].expand(-1, len(query), 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)


def check(query, key, value, mask, query_ends, kv_lens, num_heads, num_kv_heads, sparse_mode) -> None:
    require_dtype(query, torch.float16, torch.bfloat16, what="query")
    require(query.dtype == key.dtype == value.dtype, "query, key and value have one dtype")
    require_contiguous(query=query, key=key, value=value, atten_mask=mask)
    require(query.dim() == 3 and query.shape[1] == num_heads, "query is [T, num_heads, size]")
    require(num_heads % num_kv_heads == 0 and num_heads // num_kv_heads <= 64, "at most 64 heads share a KV head")
    require(bool(query_ends) and bool(kv_lens), "with TND both lists of lengths are given")
    require(list(query_ends) == sorted(query_ends), "actual_seq_lengths are cumulative")
    require(query_ends[-1] == len(query), "the last of actual_seq_lengths is the number of query tokens")
    require(len(query_ends) == len(kv_lens) <= 4096, "one length of keys for each request, at most 4096")
    if sparse_mode in (LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND):
        require(mask is not None and mask.shape[-2:] == COMPRESSED_MASK, "modes 2, 3 and 4 want a mask 2048 x 2048")
        require(mask.dtype in (torch.bool, torch.int8, torch.uint8), "the mask is bool, int8 or uint8")
        require(torch.equal(mask.reshape(COMPRESSED_MASK).bool(), UPPER_TRIANGLE), "the mask is an upper triangle")


UPPER_TRIANGLE = torch.ones(COMPRESSED_MASK, dtype=torch.bool).triu(1)


def check_pages(key, value, block_table, query_ends, kv_lens, num_kv_heads, block_size) -> None:
    require(block_table.dtype == torch.int32 and block_table.dim() == 2, "block_table is int32 [batch, pages]")
    require_contiguous(block_table=block_table)
    require(len(block_table) == len(kv_lens), "one row of block_table for each request")
    require(key.shape == value.shape and key.shape[1] == block_size, "caches are [num_blocks, block_size, …]")
    require(key[0, 0].numel() <= 65535 and key[0, 0].numel() % num_kv_heads == 0, "a row of a cache is all heads")
    prefill = any(end - start > 1 for start, end in ranges(query_ends))
    multiple, most = (128, 512) if prefill else (16, 512)
    require(block_size % multiple == 0 and block_size <= most, f"block_size is a multiple of {multiple} up to {most}")


@emulates("atb::_npu_paged_attention")
def _npu_paged_attention(
    query, key_cache, value_cache, num_kv_heads, num_heads, scale_value, block_table, context_lens, out, *,
    workspace=None,
):  # fmt: skip
    """One query token a request, at the end of its keys. context_lens: int32, on the host."""
    require_dtype(query, torch.float16, torch.bfloat16, what="query")
    require_contiguous(query=query, key_cache=key_cache, value_cache=value_cache, block_table=block_table, out=out)
    require(block_table.dtype == context_lens.dtype == torch.int32, "block_table and context_lens are int32")
    require(key_cache.shape[2] == num_kv_heads and query.shape[1] == num_heads, "heads are as many as is said")
    require(key_cache.shape[1] <= 128, "block_size is at most 128")
    require(len(query) == len(block_table) == len(context_lens), "one query token for each request")
    pages = paged(key_cache, value_cache, block_table, context_lens.tolist(), num_kv_heads)
    for row, (key, value) in enumerate(pages):
        visible = torch.ones(1, len(key), dtype=torch.bool)
        out[row : row + 1] = attend(query[row : row + 1], key, value, visible, scale_value)
