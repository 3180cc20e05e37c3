"""paged_attention: one launch for any batch. Few queries split their keys over programs; the last one merges."""

import functools
import math

import torch
import triton

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _launch, _paged_attention, _supports
from vllm_opset.ops.paged_attention import PagedAttentionProblem, check_shapes
from vllm_opset.ops.paged_batch import PagedBatch, window_sides

MAX_HEAD_SIZE = 256
MAX_GROUP = 128  # query heads of a KV head: rows of the largest tile
MIN_ROWS = 16  # that a matrix instruction takes
WARPGROUP = 4  # warps: with fewer, the results of larger tiles do not fit the registers
FEW_ROWS = 64  # of a request, at most, for what the launch parameters call few
MAX_ROWS_FP32 = 32  # without tensor cores, a program's products are unrolled: more rows compile for minutes
ROW_BYTES = 256  # of a query or key, up to which a tile holds as many as the launch parameters say


def supports(problem: PagedAttentionProblem) -> str | None:
    """Head sizes up to 256, any block size; fp32, bf16 and fp16; the KV cache the same, or fp8 e4m3."""
    if problem.head_size > MAX_HEAD_SIZE:
        return f"the results of a head over {MAX_HEAD_SIZE} do not fit a program's registers"
    if problem.num_heads // problem.num_kv_heads > MAX_GROUP:
        return f"a tile holds up to {MAX_GROUP} query heads of a KV head"
    if problem.kv_cache_dtype not in (problem.dtype, torch.float8_e4m3fn):
        return f"a KV cache in {problem.kv_cache_dtype} with queries in {problem.dtype}: make it the same, or fp8 e4m3"
    return _supports.kv_cache(problem)


@kernel(ops.paged_attention, name="triton", supports=supports)
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
    if scale <= 0:
        raise ValueError(f"a scale of {scale}: it must be above zero")
    left, right = window_sides(window, batch.causal)
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads, block_size = kv_cache.shape[1:3]
    num_reqs, group = len(batch.seq_lens), num_heads // num_kv_heads
    if num_tokens == 0 or num_reqs == 0:
        return
    few = batch.max_query_len * group <= FEW_ROWS
    if few:
        values = _launch.parameters("paged_attention_few", query.device, num_reqs * num_kv_heads)
    else:
        values = _launch.parameters("paged_attention_many", query.device, num_tokens * num_heads)
    block_d = triton.next_power_of_2(head_size)
    row_bytes = block_d * query.element_size()
    rows = values["rows"] * ROW_BYTES // max(ROW_BYTES, row_bytes)
    rows = _rows(max(rows, batch.max_query_len * group if few else 0), group, query.dtype)
    warps = values["warps"] if rows == MIN_ROWS else max(values["warps"], WARPGROUP)
    queries = rows // group
    one_tile = batch.max_query_len <= queries
    num_items = (num_reqs if one_tile else num_tokens // queries + num_reqs) * num_kv_heads

    span = batch.max_seq_len
    if left is not None and right is not None:
        span = min(span, left + right + min(queries, batch.max_query_len))
    block_n = max(MIN_ROWS, values["keys"] * ROW_BYTES // max(ROW_BYTES, row_bytes))
    wanted = values["programs"] * _multiprocessors(query.device) // num_items
    quickest = round(math.sqrt(_paged_attention.MERGE_KEYS.value * span) / block_n) * block_n
    num_splits = max(1, min(wanted, triton.cdiv(span, max(block_n, quickest, values["share"]))))
    workspace = batch.once(_workspace, num_items, num_splits, rows, block_d) if num_splits > 1 else (None,) * 3

    _paged_attention.paged_attention[(num_items * num_splits,)](
        query, query.stride(), kv_cache, kv_cache.stride(), out, out.stride(),
        batch.query_start_loc, batch.seq_lens, batch.block_table, batch.block_table.stride(), num_reqs,
        scale, soft_cap or None, alibi_slopes, sinks, k_scale, v_scale,
        *workspace, num_splits, values["share"],
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_SIZE=head_size, BLOCK_SIZE=block_size,
        LEFT=left, RIGHT=right, ONE_TILE=one_tile, ONE_PASS=few, SPLIT=num_splits > 1,
        BLOCK_M=rows, BLOCK_N=block_n, BLOCK_D=block_d,
        num_warps=warps, num_stages=values["stages"], **_launch.overlap(query.device),
    )  # fmt: skip


def _rows(wanted: int, group: int, dtype: torch.dtype) -> int:
    """Of a query tile: a power of two that holds at least one token."""
    if dtype == torch.float32:
        wanted = min(wanted, MAX_ROWS_FP32)
    return triton.next_power_of_2(max(MIN_ROWS, group, wanted))


def _workspace(batch: PagedBatch, num_items: int, num_splits: int, rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """Partial results, their maxima and totals, and how many programs of a tile have stored theirs.

    The layers of a step use it one after the other, and each leaves the counts at zero.
    """
    device, parts = batch.seq_lens.device, num_items * num_splits
    partials = torch.empty(parts, rows, columns, dtype=torch.float32, device=device)
    maxima = torch.empty(parts, rows, 2, dtype=torch.float32, device=device)
    return partials, maxima, torch.zeros(num_items, dtype=torch.int32, device=device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Of a GPU; in the interpreter, of the one that is to be proven there."""
    return 132 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
