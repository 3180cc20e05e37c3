"""paged_attention in Triton: four variants, by the rows of a request: its queries times the query heads of a KV head.

- `decode` (decode.py): up to 16 rows.
- `verify` (decode.py): up to `verify_rows` (64), such as those of drafted tokens and ends of prompts.
- `prefill_sm90`: on Hopper GPUs, more rows in bf16 and fp16, and drafts if there are enough requests to fill the GPU.
- `prefill`: all others, such as those with ALiBi, in fp32, or in fp16 with an fp8 cache.

An order to read them in: `_call`, `_tile`, `decode`, `combine` and `prefill`; then `prefill_sm90` with `_plan_sm90`,
`_load_sm90`, `_attend_sm90`, `_queries_sm90` and `_widen_sm90`. Thresholds are in launch.yaml.
"""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _launch, _supports
from vllm_opset.kernels.triton.paged_attention import _call, _warm, decode, prefill, prefill_sm90
from vllm_opset.kernels.triton.paged_attention._call import Call, tile_columns, tile_rows
from vllm_opset.ops.attention.paged_attention import PagedAttentionProblem, check_inputs
from vllm_opset.ops.attention.paged_batch import PagedBatch, refuse_split_kv, window_sides
from vllm_opset.targets import WGMMA
from vllm_opset.variants import Variant, Variants

MAX_HEAD_SIZE = 256
MAX_GROUP = 128  # query heads of a KV head: rows of the largest tile
LAUNCHES = {
    "prefill_sm90": prefill_sm90.launch_prefill_sm90,
    "decode": decode.launch_decode,
    "verify": decode.launch_verify,
    "prefill": prefill.launch_prefill,
}


def supports(problem: PagedAttentionProblem) -> str | None:
    """Head sizes up to 256, any block size; fp32, bf16 and fp16; the KV cache the same, or fp8 e4m3."""
    if problem.head_size > MAX_HEAD_SIZE:
        return f"the results of a head over {MAX_HEAD_SIZE} do not fit a program's registers"
    if problem.num_heads // problem.num_kv_heads > MAX_GROUP:
        return f"a tile holds up to {MAX_GROUP} query heads of a KV head"
    if problem.kv_cache_dtype not in (problem.dtype, torch.float8_e4m3fn):
        return f"a KV cache in {problem.kv_cache_dtype} with queries in {problem.dtype}: make it the same, or fp8 e4m3"
    return refuse_split_kv(problem) or _supports.kv_cache(problem)


def describe(
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
) -> Call:
    """What a variant is chosen by."""
    sides = window_sides(window, batch.causal)
    return Call(query, kv_cache, batch, out, scale, *sides, soft_cap, alibi_slopes, sinks, k_scale, v_scale)


VARIANTS = Variants(
    describe,
    Variant("prefill_sm90", prefill_sm90.can_prefill_sm90, prefill_sm90.suits_prefill_sm90, plans_on_device=True),
    Variant("decode", decode.can_decode),
    Variant("verify", decode.can_verify),
    Variant("prefill"),
    warm=_warm.batches,
)


@kernel(ops.paged_attention, name="triton", supports=supports, variants=VARIANTS)
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
    check_inputs(query, kv_cache, out, scale, alibi_slopes, sinks)
    if query.shape[0] == 0 or batch.seq_lens.shape[0] == 0:
        return
    call = describe(
        query, kv_cache, batch, out, scale=scale, window=window, soft_cap=soft_cap, alibi_slopes=alibi_slopes,
        sinks=sinks, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    LAUNCHES[VARIANTS.pick(call, variant)](call)


def most_workspace(
    num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, num_reqs: int, device: torch.device
) -> int:
    """Bytes of partial results, at most, in a step of so many requests. dtype: of the queries.

    A request that has several queries makes the tiles of all requests as large as its own.
    """
    group, columns = num_heads // num_kv_heads, tile_columns(head_size)

    def programs(launch: str) -> int:
        most = max(values["programs"] for _, values in _launch.entries(launch, device))
        return most * _launch.multiprocessors(device)

    rows = [values["rows"] for _, values in _launch.entries("paged_attention_prefill", device)]
    partial_rows = [programs("paged_attention_prefill") * tile_rows(max(rows), group, dtype)]
    if WGMMA in _launch.target(device).features:
        partial_rows.append(programs("paged_attention_prefill_sm90") * prefill_sm90.rows_of_tile(columns))
    verify_rows = _call.thresholds(device)["verify_rows"]
    if group <= verify_rows:
        of_decode = [(decode.launch_of_decode(columns, caches_fp8), _call.MIN_ROWS) for caches_fp8 in (False, True)]
        for launch, wanted in (*of_decode, ("paged_attention_verify", verify_rows)):
            num_partials = (max(1, programs(launch) // num_kv_heads) + num_reqs) * num_kv_heads
            partial_rows.append(num_partials * tile_rows(wanted, group, dtype))
    return max(partial_rows) * (columns + _call.STATS) * torch.float32.itemsize
