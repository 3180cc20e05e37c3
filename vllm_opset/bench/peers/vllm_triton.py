"""vLLM's own Triton kernels: `unified_attention`, launched as vLLM's backend does, and top-k and top-p."""

import importlib
import importlib.util

import torch

from vllm_opset.ops.attention.paged_batch import PagedBatch, window_sides

MODULE = "vllm.v1.attention.ops.triton_unified_attention"
SAMPLER = "vllm.v1.sample.ops.topk_topp_sampler"
# vLLM's backend splits the keys of a decode step if requests times KV heads are fewer than this …
PROGRAMS = 128
# … into this many parts.
PARTS = 16


def unavailable(device: str) -> str | None:
    """Why it is missing: it needs Triton on a GPU."""
    if device != "cuda":
        return "vLLM's Triton kernels are for GPUs"
    return None if importlib.util.find_spec("vllm") else "vLLM is not installed"


def paged_attention(
    query, kv_cache, batch, out, *, scale, window=None, soft_cap=0.0, alibi_slopes=None, sinks=None, k_scale=None,
    v_scale=None,
):  # fmt: skip
    """Attention on keys and values without moving them."""
    if k_scale is not None:
        raise NotImplementedError("vLLM's Triton kernel is not set up here for fp8")
    left, right = window_sides(window, batch.causal)
    key, value = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    output, maxima, sums = batch.once(_parts, query.shape[1], kv_cache.shape[1], query.shape[2])
    importlib.import_module(MODULE).unified_attention(
        q=query, k=key, v=value, out=out, cu_seqlens_q=batch.query_start_loc, max_seqlen_q=batch.max_query_len,
        seqused_k=batch.seq_lens, max_seqlen_k=batch.max_seq_len, softmax_scale=scale, causal=batch.causal,
        window_size=(-1 if left is None else left, -1 if right is None else right), block_table=batch.block_table,
        softcap=soft_cap, q_descale=None, k_descale=None, v_descale=None, seq_threshold_3D=len(output),
        num_par_softmax_segments=PARTS, softmax_segm_output=output, softmax_segm_max=maxima,
        softmax_segm_expsum=sums, alibi_slopes=alibi_slopes, sinks=sinks,
    )  # fmt: skip


def top_k_top_p_sample(logits, keys, temperature=None, top_k=None, top_p=None, min_p=None, processed=None):
    """vLLM's sampler without FlashInfer: vLLM's kernel for 8 or more rows, and a sort for fewer."""
    if temperature is None or min_p is not None or processed is not None:
        raise NotImplementedError("what vLLM has kernels for here is top-k and top-p")
    sampler = importlib.import_module(SAMPLER)
    x = sampler.apply_top_k_top_p(logits / temperature[:, None], top_k, top_p)
    return sampler.random_sample(x.softmax(-1), {}), None


def _parts(batch: PagedBatch, num_heads: int, num_kv_heads: int, head_size: int) -> tuple[torch.Tensor, ...]:
    """Buffers for partial results, their maxima and sums."""
    shape, device = (PROGRAMS // num_kv_heads, num_heads, PARTS), batch.seq_lens.device
    padded = 1 << (head_size - 1).bit_length()
    return tuple(torch.empty(size, dtype=torch.float32, device=device) for size in ((*shape, padded), shape, shape))
