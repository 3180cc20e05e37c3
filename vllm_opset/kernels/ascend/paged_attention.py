"""paged_attention by npu_fused_infer_attention_score: prefill, chunked prefill, decode, GQA and windows in one call.

Source: docs of npu_fused_infer_attention_score, in layout TND as vllm-ascend calls it: query [T, num_heads, head_size];
caches [num_blocks, block_size, num_kv_heads * head_size], contiguous; where the queries of each request end and how
many keys it has as lists on the host; a mask of [2048, 2048] by which sparse mode 3 is causal, aligned to the last key,
and sparse mode 4 a band of it that begins pre_tokens before. Head sizes, block sizes and the meaning of pre_tokens are
where documents disagree: see `_constraints`.

The lists are made once a step, for all layers together (`PagedBatch.once`): from the lengths on the host where the
batch has them, and else read back from the device. They are fixed when a graph is captured: this kernel is for eager
execution.

Doubtful until seen on hardware: docs say that sparse mode and pre_tokens are ignored for requests of one query, which
would widen a window in decode, and vllm-ascend passes them all the same; whether NaN in keys that no query sees stays
there, as the contract wants it. Not supported: no mask at all, which gave averages of everything on one release
(vllm-ascend #13699), so all attention that is not causal; soft cap, ALiBi, sinks, fp8.
"""

import functools
from typing import NamedTuple

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.ascend import _cache, _constraints
from vllm_opset.kernels.ascend._operators import npu
from vllm_opset.ops.paged_attention import PagedAttentionProblem, check_shapes
from vllm_opset.ops.paged_batch import PagedBatch, window_sides

CAUSAL, BAND = 3, 4  # sparse modes


def supports(problem: PagedAttentionProblem) -> str | None:
    """bf16 and fp16 on A2 and A3, head sizes 64 and 128, block size 128; causal, any window; keys and values apart."""
    absent = {"soft cap": problem.soft_cap, "ALiBi": problem.alibi, "sinks": problem.sinks}
    asked = [feature for feature, used in absent.items() if used]
    if asked:
        return f"npu_fused_infer_attention_score has no {', '.join(asked)}"
    if not problem.causal:
        return "without a mask, npu_fused_infer_attention_score has given wrong results (vllm-ascend #13699)"
    shape = problem.num_heads, problem.num_kv_heads, problem.head_size, problem.block_size
    return (
        _cache.supports(problem)
        or _constraints.attention(*shape)
        or _constraints.refused("npu_fused_infer_attention_score", problem)
    )


@kernel(ops.paged_attention, name="ascend", supports=supports)
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
    check_shapes(query, kv_cache, out, alibi_slopes, sinks)
    if not batch.causal:
        raise ValueError("the layer was built for causal attention, and this batch is not causal")
    left, _ = window_sides(window, batch.causal)
    key_cache, value_cache = (cache.flatten(2) for cache in _cache.caches(kv_cache))
    lengths = batch.once(host_lengths)
    num_tokens = lengths.query_ends[-1] if lengths.query_ends else 0
    wrong = _constraints.attention_lengths(lengths.query_ends, lengths.seq_lens, num_tokens)
    if wrong or key_cache.numel() > _constraints.ATTENTION_MAX_CACHE:
        raise ValueError(wrong or f"a layer's key cache may hold 2**31 - 1 elements, not {key_cache.numel()}")
    if num_tokens == 0:
        return
    band = {} if left is None else {"pre_tokens": left + _constraints.PRE_TOKENS_EXTRA, "next_tokens": 0}
    attended, _ = npu.npu_fused_infer_attention_score(
        query[:num_tokens].contiguous(),
        key_cache,
        value_cache,
        atten_mask=causal_mask(query.device),
        actual_seq_lengths=lengths.query_ends,
        actual_seq_lengths_kv=lengths.seq_lens,
        block_table=lengths.block_table,
        num_heads=query.shape[1],
        scale=scale,
        input_layout="TND",
        num_key_value_heads=kv_cache.shape[1],
        sparse_mode=CAUSAL if left is None else BAND,
        block_size=kv_cache.shape[2],
        **band,
    )
    out[:num_tokens] = attended


class Lengths(NamedTuple):
    """Of the requests that have queries: where these end, how many keys they have, and their pages."""

    query_ends: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor


def host_lengths(batch: PagedBatch) -> Lengths:
    """Leaves padded requests out, of whose empty ranges no document speaks."""
    (starts, seq_lens), pages = batch.host_lengths(), batch.block_table
    kept = [row for row, end in enumerate(starts[1:]) if end > starts[row]]
    if kept == list(range(len(kept))):  # vLLM's padding comes last
        pages = pages[: len(kept)]
    else:
        pages = pages.index_select(0, torch.tensor(kept, dtype=torch.int64, device=pages.device))
    return Lengths([starts[row + 1] for row in kept], [seq_lens[row] for row in kept], pages.contiguous())


@functools.cache
def causal_mask(device: torch.device) -> torch.Tensor:
    """One where a query must not look, in the form that the sparse modes want. Not a tensor of inference mode alone."""
    with torch.inference_mode(False):
        size = _constraints.ATTENTION_MASK
        return torch.ones(size, size, dtype=torch.int8, device=device).triu(1)
