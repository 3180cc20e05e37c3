"""paged_attention in C++ for decode, and by PyTorch for prefill.

- `decode` reads each key and value in place, once for all query heads that share it.
- `torch` gathers them for PyTorch's fused attention. Its matrix products are faster for requests with many queries.
- `mixed` attends in both ways. Each request of the batch goes where its number of query tokens is served faster.
"""

import ctypes
import functools
import sys

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.cpp._build import FLOAT, INT, POINTER, function
from vllm_opset.kernels.cpp._types import LANES, TYPES, supports_type
from vllm_opset.kernels.cpu import paged_attention as in_torch
from vllm_opset.ops.attention.paged_attention import PagedAttentionProblem, check_inputs
from vllm_opset.ops.attention.paged_batch import PagedBatch, refuse_split_kv, window_sides
from vllm_opset.variants import Variant, Variants

# Up to this many query tokens of a request, reading its keys for each token costs less than gathering them once
# (docs/log/cpu.md).
DECODE_TOKENS = 6

run = function("paged_attention", INT, *[POINTER] * 6, INT, INT, POINTER)


class Layer(ctypes.Structure):
    """The struct `Layer` of paged_attention.cpp."""

    _fields_ = (
        *((name, INT) for name in ("num_heads", "num_kv_heads", "head_size", "block_size")),
        *((name, INT) for name in ("query_token", "query_head", "out_token", "out_head")),
        *((name, INT) for name in ("cache_block", "cache_head", "cache_slot", "table_row", "left", "right")),
        *((name, FLOAT) for name in ("scale", "value_scale", "soft_cap")),
        *((name, POINTER) for name in ("slopes", "sinks")),
    )


def supports(problem: PagedAttentionProblem) -> str | None:
    """fp32 and bf16, a cache of the same, head sizes that are multiples of 16."""
    if problem.kv_cache_dtype != problem.dtype:
        return f"not built for {problem.dtype} with a cache in {problem.kv_cache_dtype}"
    if problem.head_size % LANES:
        return f"the head size is {problem.head_size}, no multiple of {LANES}"
    return refuse_split_kv(problem) or supports_type(problem)


def describe(
    query: torch.Tensor, kv_cache: torch.Tensor, batch: PagedBatch, out: torch.Tensor, **options
) -> tuple[str, bool]:
    """The variant that suits the requests, and whether the C++ code can read and write these tensors."""
    contiguous = query.stride(2) == out.stride(2) == kv_cache.stride(3) == 1
    return batch.once(suited), contiguous and query.dtype == kv_cache.dtype


def suited(batch: PagedBatch) -> str:
    """The variant that suits the numbers of query tokens of a batch."""
    if batch.max_query_len <= DECODE_TOKENS:
        return "decode"
    query_lens = batch.query_start_loc.diff()
    return "mixed" if ((query_lens > 0) & (query_lens <= DECODE_TOKENS)).any() else "torch"


VARIANTS = Variants(
    describe,
    Variant("decode", can=lambda call: call[1], suits=lambda call: call[0] == "decode"),
    Variant("mixed", can=lambda call: call == ("mixed", True)),
    Variant("torch"),
)


@kernel(ops.paged_attention, name="cpp", supports=supports, variants=VARIANTS)
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
    variant: str | None = None,
) -> None:
    variant = VARIANTS.of(variant, query, kv_cache, batch, out)
    if variant != "decode":
        in_torch.paged_attention(
            query, kv_cache, batch, out, scale=scale, window=window, soft_cap=soft_cap, alibi_slopes=alibi_slopes,
            sinks=sinks, k_scale=k_scale, v_scale=v_scale, least_tokens=DECODE_TOKENS + 1 if variant == "mixed" else 1,
        )  # fmt: skip
    if variant == "torch":
        return
    check_inputs(query, kv_cache, out, scale, alibi_slopes, sinks)
    left, right = window_sides(window, batch.causal)
    slopes, sinks = (None if values is None else values.float().contiguous() for values in (alibi_slopes, sinks))
    query_start_loc, seq_lens, block_table = batch.once(addressable)
    layer = _layer(
        *query.shape[1:], *kv_cache.shape[1:3], query.stride(), out.stride(), kv_cache.stride(), block_table.stride(0),
        left, right, scale if k_scale is None else scale * float(k_scale), 1.0 if v_scale is None else float(v_scale),
        soft_cap, None if slopes is None else slopes.data_ptr(), None if sinks is None else sinks.data_ptr(),
    )  # fmt: skip
    run(
        TYPES[query.dtype], query.data_ptr(), kv_cache.data_ptr(), out.data_ptr(),
        query_start_loc.data_ptr(), seq_lens.data_ptr(), block_table.data_ptr(), len(seq_lens),
        DECODE_TOKENS if variant == "mixed" else sys.maxsize, ctypes.byref(layer),
    )  # fmt: skip


def addressable(batch: PagedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query_start_loc, seq_lens and block_table, with contiguous rows."""
    block_table = batch.block_table
    if block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    return batch.query_start_loc.contiguous(), batch.seq_lens.contiguous(), block_table


# The layers of a model differ little, so every decode step uses the same few structs.
@functools.lru_cache(maxsize=256)
def _layer(
    num_heads, head_size, num_kv_heads, block_size, query, out, cache, table_row, left, right,
    scale, value_scale, soft_cap, slopes, sinks,
) -> Layer:  # fmt: skip
    sides = (-1 if side is None else side for side in (left, right))
    return Layer(
        num_heads, num_kv_heads, head_size, block_size, *query[:2], *out[:2], *cache[:3], table_row, *sides,
        scale, value_scale, soft_cap, slopes, sinks,
    )  # fmt: skip
