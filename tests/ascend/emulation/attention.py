"""Fused infer attention, packed or over a paged cache, and ATB's paged attention: computed in fp32, rounded once.

The emulation does not read a key that no query sees, and a query that sees no key gives NaN. The documents promise
neither. So no kernel may rely on the NaN, and the tests show nothing about unseen keys.
"""

import math
from collections.abc import Iterator

import torch

from emulation.registry import documented, emulates, refuse, require

UNLIMITED = 2**31 - 1
LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND = 2, 3, 4
UPPER_TRIANGLE = torch.ones(documented.ATTENTION_MASK, documented.ATTENTION_MASK, dtype=torch.bool).triu(1)


@emulates("npu::npu_fused_infer_attention_score")
def npu_fused_infer_attention_score(
    query, key, value, *, atten_mask=None, actual_seq_lengths=None, actual_seq_lengths_kv=None, block_table=None,
    num_heads=1, scale=1.0, pre_tokens=UNLIMITED, next_tokens=UNLIMITED, input_layout="BSH", num_key_value_heads=0,
    sparse_mode=0, inner_precise=0, block_size=0, softmax_lse_flag=False, **others,
):  # fmt: skip
    if input_layout != "TND" or softmax_lse_flag or any(other not in (None, 0) for other in others.values()):
        raise NotImplementedError(f"only layout TND is emulated, without log-sum-exp, rope and quantisation: {others}")
    num_kv_heads = num_key_value_heads or num_heads
    ends, lens = actual_seq_lengths, actual_seq_lengths_kv
    require(bool(ends) and bool(lens), "with TND both lists of lengths are given")
    check(query, key, value, atten_mask, num_heads, num_kv_heads, sparse_mode)
    if block_table is None:
        check_packed(key, value, ends, lens, len(query))
        requests = ((key[start:end], value[start:end]) for start, end in ranges(lens))
    else:
        check_paged(query, key, value, block_table, ends, lens, num_kv_heads, block_size)
        requests = paged(key, value, block_table, lens, num_kv_heads)
    out = torch.empty_like(query)
    for (start, end), (keys, values) in zip(ranges(ends), requests, strict=True):
        visible = seen(end - start, len(keys), atten_mask, sparse_mode, pre_tokens, next_tokens)
        out[start:end] = attend(query[start:end], keys, values, visible, scale)
    return out, torch.empty(0)


@emulates("atb::_npu_paged_attention")
def _npu_paged_attention(
    query, key_cache, value_cache, num_kv_heads, num_heads, scale_value, block_table, context_lens, out, *,
    workspace=None,
):  # fmt: skip
    """Attends one query of each request, at the request's last key."""
    refuse(documented.contiguous(query=query, key=key_cache, value=value_cache, block_table=block_table, out=out))
    require(query.dtype == key_cache.dtype == value_cache.dtype == out.dtype, "all are of one dtype")
    require(
        query.dim() == 3 and query.shape[1] == num_heads and out.shape == query.shape, "rows are [T, num_heads, size]"
    )
    refuse(documented.atb_attention(num_heads, num_kv_heads, query.shape[2], key_cache.shape[1]))
    require(key_cache.shape == value_cache.shape, "caches have one shape")
    require(key_cache.shape[2:] == (num_kv_heads, query.shape[2]), "caches are [num_blocks, block_size, heads, size]")
    require(block_table.dtype == torch.int32 and len(block_table) == len(query), "block_table is int32 [T, pages]")
    refuse(documented.atb_lengths(context_lens, len(query)))
    requests = paged(key_cache.flatten(2), value_cache.flatten(2), block_table, context_lens.tolist(), num_kv_heads)
    for row, (keys, values) in enumerate(requests):
        everything = torch.ones(1, len(keys), dtype=torch.bool)
        out[row : row + 1] = attend(query[row : row + 1], keys, values, everything, scale_value)


def ranges(ends: list[int]) -> Iterator[tuple[int, int]]:
    return zip([0, *ends[:-1]], ends, strict=True)


def paged(key, value, block_table, lens, num_kv_heads) -> Iterator[tuple[torch.Tensor, ...]]:
    """Keys and values [len, heads, size] of each request, from caches [num_blocks, block_size, heads * size]."""
    for pages, num_keys in zip(block_table, lens, strict=True):
        pages = pages[: -(-num_keys // key.shape[1])].long()
        rows = (cache[pages].flatten(0, 1)[:num_keys] for cache in (key, value))
        yield tuple(row.view(num_keys, num_kv_heads, row.shape[-1] // num_kv_heads) for row in rows)


def seen(num_queries, num_keys, mask, sparse_mode, pre_tokens, next_tokens) -> torch.Tensor:
    """Which key each query sees. Modes 1, 2 and 3 ignore pre_tokens and next_tokens; so does mode 0 without a mask."""
    query, key = torch.arange(num_queries).unsqueeze(1), torch.arange(num_keys)
    pre_tokens -= documented.PRE_TOKENS_EXTRA
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
    if sparse_mode == BAND and num_queries == 1 and not documented.BAND_HOLDS_FOR_ONE_QUERY:
        return torch.ones(num_queries, num_keys, dtype=torch.bool)
    if sparse_mode == BAND:
        return (key >= query + last - pre_tokens) & (key <= query + last + next_tokens)
    raise NotImplementedError(f"sparse_mode {sparse_mode} is not emulated")


def attend(query, key, value, visible, scale) -> torch.Tensor:
    """query: [n, heads, size]. key, value: [m, kv_heads, size]. visible: [n, m]."""
    unseen = ~visible.any(dim=0)[:, None, None]
    groups = query.shape[1] // key.shape[1]
    key, value = (x.float().masked_fill(unseen, 0).repeat_interleave(groups, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)


def check(query, key, value, mask, num_heads, num_kv_heads, sparse_mode) -> None:
    require(query.dtype == key.dtype == value.dtype, "query, key and value have one dtype")
    refuse(documented.contiguous(query=query, key=key, value=value))
    require(query.dim() == 3 and query.shape[1] == num_heads, "query is [T, num_heads, size]")
    require(num_heads % num_kv_heads == 0, "num_heads is a multiple of num_key_value_heads")
    if sparse_mode in (LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND):
        fits = mask is not None and mask.shape[-2:] == UPPER_TRIANGLE.shape
        require(fits, f"modes 2, 3 and 4 want a mask {tuple(UPPER_TRIANGLE.shape)}")
        require(mask.dtype in (torch.bool, torch.int8, torch.uint8), "the mask is bool, int8 or uint8")
        refuse(documented.contiguous(mask=mask))
        require(torch.equal(mask.reshape(UPPER_TRIANGLE.shape).bool(), UPPER_TRIANGLE), "it is an upper triangle")


def check_packed(key, value, ends, lens, num_rows) -> None:
    """Checks that the lengths of keys are cumulative too."""
    refuse(documented.attention_lengths(ends, lens, num_rows))
    refuse(documented.attention_lengths(lens, lens, len(key)))
    require(key.shape == value.shape, "key and value have one shape")


def check_paged(query, key, value, block_table, ends, lens, num_kv_heads, block_size) -> None:
    refuse(documented.attention_lengths(ends, lens, len(query)))
    refuse(documented.attention(query.shape[1], num_kv_heads, query.shape[2], block_size))
    refuse(documented.contiguous(block_table=block_table))
    require(block_table.dtype == torch.int32 and block_table.dim() == 2, "block_table is int32 [batch, pages]")
    require(len(block_table) == len(lens), "one row of block_table for each request")
    require(
        key.shape == value.shape and key.shape[1] == block_size, "caches are [num_blocks, block_size, heads * size]"
    )
    require(key.shape[2:] == (num_kv_heads * query.shape[2],), "a row of a cache is all heads")
