"""paged_attention by npu_fused_infer_attention_score: prefill, chunked prefill, decode, GQA and windows in one call.

The kernel "ascend" uses npu_fused_infer_attention_score in layout TND, as vllm-ascend calls it. Source: its docs.

- The query is [T, num_heads, head_size]. The caches are [num_blocks, block_size, num_kv_heads * head_size], contiguous.
- The ends of the requests' queries and their numbers of keys are lists on the host.
- The mask is [2048, 2048]. Sparse mode 3 is causal, aligned to the last key. Sparse mode 4 is a band of it that begins
  pre_tokens before.

Documents disagree on head sizes, block sizes and the meaning of pre_tokens: see `_constraints`. The lists are made once
a step for all layers (`PagedBatch.once`). They come from the lengths on the host if the batch has them; otherwise they
are read back from the device.

The kernel "ascend_atb" runs only if an override names it. If every request of a step has one query, it uses ATB's
_npu_paged_attention, which has no window. Otherwise it does the same as "ascend". The operator is not in docs.
op-plugin's test and vllm-ascend pass the lengths as an int32 tensor on the host and everything else on the device. So a
step does not wait for the device if the host knows its lengths.

Both operators take the lengths at launch, so a captured graph keeps the lengths of its capture. To change them, a graph
must be captured with torch.npu.graph(auto_dispatch_capture=True). NPUGraph.update can then pass other lengths, as
actual_seq_lengths_kv or context_lens (torch_npu's sources; not run).

Two points are open until they are seen on hardware. The docs say that sparse mode and pre_tokens are ignored for
requests of one query, which would widen a window in decode; vllm-ascend passes them all the same. It is not documented
whether NaN in keys that no query sees changes nothing, as the contract requires.

Attention without a mask is not supported, because it gave averages of everything on one release (vllm-ascend #13699).
So attention that is not causal is not supported. Neither are soft cap, ALiBi, sinks and fp8.
"""

import functools
from typing import NamedTuple

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.ascend import _cache, _constraints
from vllm_opset.kernels.ascend._operators import atb, npu
from vllm_opset.ops.attention.paged_attention import PagedAttentionProblem, check_inputs
from vllm_opset.ops.attention.paged_batch import PagedBatch, window_sides

CAUSAL, BAND = 3, 4  # sparse modes


def supports(problem: PagedAttentionProblem) -> str | None:
    """bf16 and fp16 on A2 and A3, head sizes 64 and 128, block size 128; causal, any window; split KV layout."""
    features = {"soft cap": problem.soft_cap, "ALiBi": problem.alibi, "sinks": problem.sinks}
    unsupported = [feature for feature, used in features.items() if used]
    if unsupported:
        return f"npu_fused_infer_attention_score has no {', '.join(unsupported)}"
    if not problem.causal:
        return "without a mask, npu_fused_infer_attention_score has given wrong results (vllm-ascend #13699)"
    if problem.window is not None and not _constraints.BAND_HOLDS_FOR_ONE_QUERY:
        return "npu_fused_infer_attention_score ignores windows where a request has one query"
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
    key_cache, value_cache, lengths = _checked(query, kv_cache, batch, out, scale, alibi_slopes, sinks)
    left, _ = window_sides(window, batch.causal)
    if not lengths.query_ends:
        return
    num_tokens = lengths.query_ends[-1]
    band = {} if left is None else {"pre_tokens": left + _constraints.PRE_TOKENS_EXTRA, "next_tokens": 0}
    attended, _ = npu.npu_fused_infer_attention_score(
        query[:num_tokens].contiguous(),
        key_cache.flatten(2),
        value_cache.flatten(2),
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


def supports_atb(problem: PagedAttentionProblem) -> str | None:
    """bf16 and fp16 on A2 and A3, head sizes 64 and 128, block size 128; causal, no window; split KV layout.

    Its own operator serves only decode steps. Other steps use the kernel "ascend", so the limits of "ascend" apply too.
    """
    if problem.window is not None:
        return "_npu_paged_attention has no window"
    shape = problem.num_heads, problem.num_kv_heads, problem.head_size, problem.block_size
    own = _constraints.atb_attention(*shape) or _constraints.refused("_npu_paged_attention", problem, "atb")
    return supports(problem) or own


@kernel(ops.paged_attention, name="ascend_atb", supports=supports_atb)
def paged_attention_atb(
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
    if window is not None:
        raise ValueError("the layer was built without a window")
    if batch.max_query_len > 1:
        paged_attention(query, kv_cache, batch, out, scale=scale, alibi_slopes=alibi_slopes, sinks=sinks)
        return
    key_cache, value_cache, lengths = _checked(query, kv_cache, batch, out, scale, alibi_slopes, sinks)
    if not lengths.seq_lens:
        return
    rows, pages = query[: len(lengths.seq_lens)].contiguous(), lengths.block_table
    attended = torch.empty_like(rows)
    atb._npu_paged_attention(
        rows,
        key_cache,
        value_cache,
        num_kv_heads=kv_cache.shape[1],
        num_heads=query.shape[1],
        scale_value=scale,
        block_table=pages.cpu() if _constraints.ATB_BLOCK_TABLE_ON_HOST else pages,
        context_lens=torch.tensor(lengths.seq_lens, dtype=torch.int32),
        out=attended,
    )
    out[: len(rows)] = attended


def _checked(query, kv_cache, batch, out, scale, alibi_slopes, sinks) -> tuple[torch.Tensor, torch.Tensor, "Lengths"]:
    """The key cache, the value cache and the step's lengths. Raises ValueError for arguments the operators refuse."""
    check_inputs(query, kv_cache, out, scale, alibi_slopes, sinks)
    if not batch.causal:
        raise ValueError("the layer was built for causal attention, and this batch is not causal")
    key_cache, value_cache = _cache.caches(kv_cache)
    if key_cache.numel() > _constraints.ATTENTION_MAX_CACHE:
        raise ValueError(f"a layer's key cache may hold 2**31 - 1 elements, not {key_cache.numel()}")
    lengths = batch.once(host_lengths)
    wrong = _constraints.attention_lengths(*lengths[:2], lengths.query_ends[-1] if lengths.query_ends else 0)
    if wrong:
        raise ValueError(wrong)
    return key_cache, value_cache, lengths


class Lengths(NamedTuple):
    """The ends of the queries, the numbers of keys, and the pages of all requests that have queries."""

    query_ends: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor


def host_lengths(batch: PagedBatch) -> Lengths:
    """The lengths without padded requests, because no document describes empty ranges."""
    (starts, seq_lens), pages = batch.host_lengths(), batch.block_table
    kept = [row for row, end in enumerate(starts[1:]) if end > starts[row]]
    if kept == list(range(len(kept))):  # vLLM's padding comes last
        pages = pages[: len(kept)]
    else:
        pages = pages.index_select(0, torch.tensor(kept, dtype=torch.int64, device=pages.device))
    return Lengths([starts[row + 1] for row in kept], [seq_lens[row] for row in kept], pages.contiguous())


@functools.cache
def causal_mask(device: torch.device) -> torch.Tensor:
    """The mask that the sparse modes require: one for keys that a query must not see.

    It is not an inference tensor, so that it also works outside inference mode.
    """
    with torch.inference_mode(False):
        size = _constraints.ATTENTION_MASK
        return torch.ones(size, size, dtype=torch.int8, device=device).triu(1)
