"""FlashAttention 3 from a stock vLLM wheel (`vllm.vllm_flash_attn`).

A step makes FlashAttention's schedule once for all layers, so its time does not count.
"""

import importlib
import importlib.util
from pathlib import Path

import torch

from vllm_opset.ops.attention.paged_batch import PagedBatch, window_sides

HOPPER = 9  # the major compute capability that it needs


def unavailable(device: str) -> str | None:
    """Why it is missing: it is a CUDA kernel for Hopper, and only in a wheel that was built with it."""
    if device != "cuda" or torch.cuda.get_device_capability()[0] != HOPPER:
        return "FlashAttention 3 is for Hopper GPUs"
    vllm = importlib.util.find_spec("vllm")
    if not vllm:
        return "vLLM, which it comes with, is not installed"
    libraries = Path(vllm.origin).parent.glob("vllm_flash_attn/_vllm_fa3_C*.so")
    return None if any(libraries) else "this vLLM was built without FlashAttention 3"


def paged_attention(
    query, kv_cache, batch, out, *, scale, window=None, soft_cap=0.0, alibi_slopes=None, sinks=None, k_scale=None,
    v_scale=None,
):  # fmt: skip
    """Attention on keys and values without moving them."""
    if alibi_slopes is not None or k_scale is not None:
        raise NotImplementedError("FlashAttention 3 is not set up here for ALiBi or fp8")
    flash = importlib.import_module("vllm.vllm_flash_attn")
    left, right = window_sides(window, batch.causal)
    sides = (-1 if left is None else left, -1 if right is None else right)
    key, value = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    schedule = batch.once(_schedule, tuple(query.shape[1:]), kv_cache.shape[1:3], query.dtype, sides, soft_cap > 0)
    flash.flash_attn_varlen_func(
        query, key, value, batch.max_query_len, batch.query_start_loc, batch.max_seq_len, seqused_k=batch.seq_lens,
        softmax_scale=scale, causal=batch.causal, window_size=list(sides), softcap=soft_cap,
        block_table=batch.block_table, out=out, scheduler_metadata=schedule, fa_version=3, s_aux=sinks,
    )  # fmt: skip


def _schedule(
    batch: PagedBatch, heads: tuple[int, int], pages: tuple[int, int], dtype: torch.dtype, sides: tuple[int, int],
    soft_cap: bool,
) -> torch.Tensor:  # fmt: skip
    """FlashAttention's schedule. heads: how many, and their size. pages: KV heads, and tokens of a page."""
    flash = importlib.import_module("vllm.vllm_flash_attn")
    return flash.get_scheduler_metadata(
        batch_size=len(batch.seq_lens), max_seqlen_q=batch.max_query_len, max_seqlen_k=batch.max_seq_len,
        num_heads_q=heads[0], num_heads_kv=pages[0], headdim=heads[1], cache_seqlens=batch.seq_lens, qkv_dtype=dtype,
        cu_seqlens_q=batch.query_start_loc, page_size=pages[1], causal=batch.causal, window_size=sides,
        has_softcap=soft_cap,
    )  # fmt: skip
