"""paged_attention on a CPU: gathers the keys and values of a chunk of the batch, and attends them with PyTorch's own
fused attention, or, where that cannot do it (soft cap, sinks), in as few passes as there are.
"""

import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.cpu._paged_plan import Chunk, geometry, make_plan
from vllm_opset.ops.paged_attention import PagedAttentionProblem, check_shapes
from vllm_opset.ops.paged_batch import PagedBatch, window_sides

# Of the scores that a soft cap or sinks need: what the second-level cache of a core holds.
SCORES_BYTES = 1 << 20


def supports(problem: PagedAttentionProblem) -> str | None:
    if problem.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"no fused attention in {problem.dtype}"
    return None


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
) -> None:
    check_shapes(query, kv_cache, out, alibi_slopes, sinks)
    left, right = window_sides(window, batch.causal)
    cache = geometry(kv_cache.shape, kv_cache.stride())
    _, num_kv_heads, _, width = kv_cache.shape
    plan = batch.once(make_plan, left, right, cache, num_kv_heads * width * kv_cache.element_size())
    if k_scale is not None:
        scale *= float(k_scale)
    rows = cache.rows_of(kv_cache)
    for chunk in plan.chunks:
        tokens = rows.index_select(0, chunk.index).to(query.dtype)
        key, value = tokens.view(chunk.num_blocks, num_kv_heads, chunk.num_keys, 2, width // 2).unbind(3)
        bias = chunk.bias if alibi_slopes is None else _with_alibi(chunk, alibi_slopes)
        if soft_cap or sinks is not None:
            attended = _attend(query[chunk.rows], key, value, chunk, bias, scale, soft_cap, sinks)
        else:
            attended = _attend_fused(query[chunk.rows], key, value, chunk, bias, scale)
        out[chunk.rows] = attended if v_scale is None else attended * float(v_scale)
    for blind in plan.blind_rows:
        out[blind] = 0


def _with_alibi(chunk: Chunk, slopes: torch.Tensor) -> torch.Tensor:
    """[num_blocks or 1, num_heads, length, num_keys]."""
    bias = slopes[:, None, None] * chunk.distance()
    return bias[None] if chunk.bias is None else bias + chunk.bias


def _attend_fused(query, key, value, chunk: Chunk, bias, scale: float) -> torch.Tensor:
    """query: [num_blocks * length, num_heads, head_size]; so is the result."""
    num_heads, head_size = query.shape[1:]
    if chunk.length == 1 and query.dtype == torch.float32:
        # The query heads of a KV head as if they were query rows: in fp32 this reads the keys once for all of them, and
        # is faster; in half precision, packing the keys for it costs more than it gains.
        query = query.view(chunk.num_blocks, key.shape[1], -1, head_size)
        if bias is not None and bias.shape[-3] > 1:
            bias = bias.view(bias.shape[0], *query.shape[1:3], -1)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
        return attended.reshape(-1, num_heads, head_size)
    query = query.view(chunk.num_blocks, chunk.length, num_heads, head_size).transpose(1, 2)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale, enable_gqa=True)
    return attended.transpose(1, 2).reshape(-1, num_heads, head_size)


def _attend(query, key, value, chunk: Chunk, bias, scale: float, soft_cap: float, sinks) -> torch.Tensor:
    """The same with a soft cap, sinks or both, in fp32, and some query rows at a time, to keep the scores close by."""
    num_blocks, num_kv_heads, num_keys, head_size = key.shape
    num_heads, dtype = query.shape[1], query.dtype
    key, value = key.float().transpose(2, 3), value.float()
    query = query.float() * (scale / soft_cap if soft_cap else scale)
    # [num_blocks, num_kv_heads, query heads of a KV head, length, head_size]
    query = query.view(num_blocks, chunk.length, num_kv_heads, -1, head_size).permute(0, 2, 3, 1, 4)
    attended = torch.empty(num_blocks, chunk.length, num_heads, head_size, dtype=dtype)
    rows = max(1, SCORES_BYTES // (num_blocks * num_heads * num_keys * 4))
    for start in range(0, chunk.length, rows):
        part = slice(start, start + rows)
        scores = torch.matmul(query[:, :, :, part].flatten(2, 3), key).view(num_blocks, num_heads, -1, num_keys)
        if soft_cap:
            scores.tanh_().mul_(soft_cap)
        if bias is not None:
            scores += bias[..., part, :]
        weights = _softmax(scores, sinks).reshape(num_blocks, num_kv_heads, -1, num_keys)
        attended[:, part] = torch.matmul(weights, value).view(num_blocks, num_heads, -1, head_size).transpose(1, 2)
    return attended.view(-1, num_heads, head_size)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """scores: [num_blocks, num_heads, rows, num_keys]."""
    if sinks is None:
        return scores.softmax(dim=-1)
    sink = sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
