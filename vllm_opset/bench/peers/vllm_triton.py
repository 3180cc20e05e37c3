"""vLLM's own Triton kernels: `unified_attention`, launched as its backend does, top-k and top-p, and `fused_experts`.

vLLM comes with launch parameters of `fused_experts` that were tuned for some shapes. Others have its defaults.
"""

import importlib
import importlib.util

import torch

from vllm_opset.ops.attention.paged_batch import PagedBatch, window_sides
from vllm_opset.ops.gemm._quantised import BLOCK, TOKEN_BLOCK
from vllm_opset.ops.schemes import FP8, PER_ROW

MODULE = "vllm.v1.attention.ops.triton_unified_attention"
SAMPLER = "vllm.v1.sample.ops.topk_topp_sampler"
EXPERTS = "vllm.model_executor.layers.fused_moe"
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


def fused_experts(
    hidden_states, w1, w2, topk_weights, topk_ids, activation="silu", w1_bias=None, w2_bias=None, expert_map=None,
    apply_router_weight_on_input=False, swiglu_limit=None, swiglu_alpha=None, swiglu_beta=None, shared_output=None,
    w1_scale=None, w2_scale=None, out_dtype=None, quant_dtype=None, group_shape=None, a1_scale=None, a2_scale=None,
    w1_zero_point=None, w2_zero_point=None,
):  # fmt: skip
    """Weights as they are, and fp8 by blocks or per channel with activations that are quantised alike."""
    parameters = (swiglu_limit, swiglu_alpha, swiglu_beta, shared_output, a1_scale, expert_map)
    if any(parameter is not None for parameter in parameters):
        raise NotImplementedError("vLLM's fused_experts is set up here for all experts and no further parameters")
    fused_moe = importlib.import_module(EXPERTS)
    if not hasattr(torch.ops._moe_C, "moe_align_block_size"):
        raise NotImplementedError("this vLLM was built without the compiled ops that its fused_experts needs")
    config = importlib.import_module(f"{EXPERTS}.config")
    if w1_scale is None:
        quant_config = config.biased_moe_quant_config(w1_bias, w2_bias)
    else:
        scheme = _scheme(w1, w1_scale, quant_dtype, group_shape)
        quant_config = config.fp8_w8a8_moe_quant_config(w1_scale, w2_scale, w1_bias=w1_bias, w2_bias=w2_bias, **scheme)
    return fused_moe.fused_experts(
        hidden_states, w1, w2, topk_weights, topk_ids, fused_moe.MoEActivation(activation),
        apply_router_weight_on_input, quant_config=quant_config,
    )  # fmt: skip


def _scheme(w1, w1_scale, quant_dtype, group_shape) -> dict:
    """The scheme of experts in fp8, in vLLM's words."""
    if w1.dtype is FP8 and quant_dtype is FP8:
        scales, groups = tuple(w1_scale.shape[1:]), tuple(group_shape)
        if groups == TOKEN_BLOCK and scales == BLOCK.scale_shape(w1.shape[1:]):
            return {"block_shape": list(BLOCK)}
        if groups == PER_ROW and scales == PER_ROW.scale_shape(w1.shape[1:]):
            return {"per_act_token_quant": True, "per_out_ch_quant": True}
    raise NotImplementedError("vLLM's fused_experts is set up here for fp8 by fp8, by blocks or per channel")


def _parts(batch: PagedBatch, num_heads: int, num_kv_heads: int, head_size: int) -> tuple[torch.Tensor, ...]:
    """Buffers for partial results, their maxima and sums."""
    shape, device = (PROGRAMS // num_kv_heads, num_heads, PARTS), batch.seq_lens.device
    padded = 1 << (head_size - 1).bit_length()
    return tuple(torch.empty(size, dtype=torch.float32, device=device) for size in ((*shape, padded), shape, shape))
