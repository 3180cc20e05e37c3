"""paged_attention on a CPU: gathers the keys and values of a chunk of the batch, then calls PyTorch's fused attention.

PyTorch's fused attention lacks soft cap and sinks. With these, separate operators compute the attention in as few
passes as possible.

The number of chunks depends on the amount of keys and values, not on the number of requests or heads. Any block size
and any order of the cache's strides work. In fp32, long sequences are read a fifth faster from head-major caches. The
block size makes no measurable difference.
"""

import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.cpu._paged_plan import Chunk, geometry, make_plan
from vllm_opset.ops.attention.paged_attention import PagedAttentionProblem, check_inputs
from vllm_opset.ops.attention.paged_batch import PagedBatch, refuse_split_kv, window_sides

# The most bytes of scores at a time with a soft cap or sinks. They fit the second-level cache of a core.
SCORES_BYTES = 1 << 20


def supports(problem: PagedAttentionProblem) -> str | None:
    """float32, bfloat16 and float16."""
    if problem.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"no fused attention in {problem.dtype}"
    return refuse_split_kv(problem)


@kernel(ops.paged_attention, name="cpu", supports=supports)
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
    least_tokens: int = 1,
) -> None:
    """least_tokens: requests with fewer query tokens are left out, for a kernel that serves them by itself."""
    check_inputs(query, kv_cache, out, scale, alibi_slopes, sinks)
    left, right = window_sides(window, batch.causal)
    cache = geometry(kv_cache.shape, kv_cache.stride())
    _, num_kv_heads, _, width = kv_cache.shape
    token_bytes = num_kv_heads * width * kv_cache.element_size()
    plan = batch.once(make_plan, left, right, cache, token_bytes, least_tokens)
    if k_scale is not None:
        scale *= float(k_scale)
    # From here on, query heads are grouped by KV head: [..., num_kv_heads, query heads of a KV head, ...].
    query, out = query.unflatten(1, (num_kv_heads, -1)), out.unflatten(1, (num_kv_heads, -1))
    rows = cache.rows_of(kv_cache)
    for chunk in plan.chunks:
        tokens = rows.index_select(0, chunk.index).to(query.dtype)
        key, value = tokens.view(chunk.num_blocks, -1, chunk.num_keys, 2, width // 2).unbind(3)
        bias = chunk.bias if alibi_slopes is None else _with_alibi(chunk, alibi_slopes.view(num_kv_heads, -1))
        queries = query[chunk.rows, chunk.heads]
        if soft_cap or sinks is not None:
            sink = None if sinks is None else sinks.view(num_kv_heads, -1)[chunk.heads]
            attended = _attend(queries, key, value, chunk, bias, scale, soft_cap, sink)
        else:
            attended = _attend_fused(queries, key, value, chunk, bias, scale)
        out[chunk.rows, chunk.heads] = attended if v_scale is None else attended * float(v_scale)
    for some in plan.rows_without_keys:
        out[some] = 0


def _with_alibi(chunk: Chunk, slopes: torch.Tensor) -> torch.Tensor:
    bias = slopes[chunk.heads, :, None, None] * chunk.distance()
    return bias[None] if chunk.bias is None else bias + chunk.bias


def _attend_fused(query, key, value, chunk: Chunk, bias, scale: float) -> torch.Tensor:
    """Attention of a chunk. query and result: [num_blocks * length, heads, query heads of a KV head, head_size]."""
    if chunk.length == 1 and query.dtype == torch.float32:
        # The query heads of a KV head are treated as query rows. In fp32 this is faster, because the keys are read once
        # for all of them. In half precision, the necessary packing of the keys costs more than this gains.
        mask = None if bias is None else bias.squeeze(3)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    by_head = query.unflatten(0, (chunk.num_blocks, -1)).flatten(2, 3).transpose(1, 2)
    mask = None if bias is None else bias.flatten(1, 2)
    attended = F.scaled_dot_product_attention(by_head, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
    return attended.transpose(1, 2).reshape(query.shape)


def _attend(query, key, value, chunk: Chunk, bias, scale: float, soft_cap: float, sinks) -> torch.Tensor:
    """Like `_attend_fused`, with a soft cap, sinks or both, in fp32.

    It takes some query rows at a time, so that the scores stay in the core's cache.
    """
    key, value = key.float().transpose(2, 3), value.float()
    # [num_blocks, heads, query heads of a KV head, length, head_size]
    by_head = query.float().unflatten(0, (chunk.num_blocks, -1)).permute(0, 2, 3, 1, 4)
    by_head = by_head * (scale / soft_cap if soft_cap else scale)
    attended = torch.empty_like(by_head)
    group, num_rows = by_head.shape[2:4]
    step = max(1, SCORES_BYTES // (by_head[..., 0, 0].numel() * chunk.num_keys * 4))
    for first in range(0, num_rows, step):
        part = slice(first, first + step)
        scores = torch.matmul(by_head[:, :, :, part].flatten(2, 3), key).unflatten(2, (group, -1))
        if soft_cap:
            scores.tanh_().mul_(soft_cap)
        if bias is not None:
            scores += bias[..., part, :]
        weights = _softmax(scores, sinks)
        attended[:, :, :, part] = torch.matmul(weights.flatten(2, 3), value).unflatten(2, (group, -1))
    return attended.permute(0, 3, 1, 2, 4).reshape(query.shape).to(query.dtype)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Weights from scores [num_blocks, heads, query heads of a KV head, rows, num_keys].

    sinks: [heads, query heads of a KV head].
    """
    if sinks is None:
        return scores.softmax(dim=-1)
    sink = sinks.float()[:, :, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
