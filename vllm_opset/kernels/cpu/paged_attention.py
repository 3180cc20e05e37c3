"""paged_attention on a CPU: gathers the keys and values of a chunk of the batch, and attends them with PyTorch's own
fused attention, or, where that cannot do it (soft cap, sinks), in as few passes as there are.
"""

import math

import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.cpu._paged_plan import Chunk, geometry, make_plan
from vllm_opset.ops.paged_attention import PagedAttentionProblem
from vllm_opset.ops.paged_batch import PagedBatch, window_sides


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
    bias = slopes[:, None, None] * chunk.distance
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
    triangular = chunk.triangular and bias is chunk.bias
    attended = F.scaled_dot_product_attention(
        query, key, value, None if triangular else bias, is_causal=triangular, scale=scale, enable_gqa=True
    )
    return attended.transpose(1, 2).reshape(-1, num_heads, head_size)


def _attend(query, key, value, chunk: Chunk, bias, scale: float, soft_cap: float, sinks) -> torch.Tensor:
    """The same in fp32, with a soft cap, sinks or both."""
    num_heads, head_size = query.shape[1:]
    num_kv_heads = key.shape[1]
    shape = (chunk.num_blocks, chunk.length, num_kv_heads, num_heads // num_kv_heads, head_size)
    grouped = query.float().view(shape).permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores = torch.matmul(grouped, key.float().transpose(2, 3))
    scores = scores.view(chunk.num_blocks, num_heads, chunk.length, chunk.num_keys)
    if soft_cap:
        scores.mul_(scale / soft_cap).tanh_().mul_(soft_cap)
    else:
        scores.mul_(scale)
    if bias is not None:
        scores += bias
    if sinks is not None:
        sink = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(dim=-1)[..., : chunk.num_keys]
    if bias is not None:
        # Rows that see no key at all are NaN until here.
        weights = weights.masked_fill(bias == -math.inf, 0)
    weights = weights.reshape(chunk.num_blocks, num_kv_heads, -1, chunk.num_keys)
    attended = torch.matmul(weights, value.float()).view(*shape[:1], *shape[2:4], chunk.length, head_size)
    return attended.permute(0, 3, 1, 2, 4).reshape(query.shape).to(query.dtype)
