"""paged_attention: one launch for any batch, one more where parts of more than 16 rows are added up."""

import functools
import math

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import INTERPRETED, _launch, _supports
from vllm_opset.kernels.triton.paged_attention import decode, prefill, prefill_sm90
from vllm_opset.kernels.triton.paged_attention.combine import COMBINED_ROWS
from vllm_opset.ops.attention.paged_attention import PagedAttentionProblem, check_shapes
from vllm_opset.ops.attention.paged_batch import PagedBatch, only_packed, window_sides

MAX_HEAD_SIZE = 256
MAX_GROUP = 128  # query heads of a KV head: rows of the largest tile
MIN_ROWS = 16  # that a matrix instruction takes
WARPGROUP = 4  # warps
WARPGROUP_RESULTS = 64 * 128  # that fit its registers, on a Hopper GPU, beside all that few queries need there
VERIFY_ROWS = 64  # of a request, at most, for what the launch parameters call few, or several
MAX_ROWS_FP32 = 32  # without tensor cores, a program's products are unrolled: more rows compile for minutes
ROW_BYTES = 256  # of a query or key, up to which a tile holds as many as the launch parameters say
COPY_BYTES = 16  # what a Hopper GPU's copy engine wants addresses and strides to be multiples of
SEVERAL_TURNS = 3  # tiles of a program, from which on its matrix instructions win over attending equal shares …
SEVERAL_KEYS = 8192  # … unless some request has more keys, since others may end long before its tiles
SM90_BYTES = 2  # of an element, that its matrix instructions take here


def supports(problem: PagedAttentionProblem) -> str | None:
    """Head sizes up to 256, any block size; fp32, bf16 and fp16; the KV cache the same, or fp8 e4m3."""
    if problem.head_size > MAX_HEAD_SIZE:
        return f"the results of a head over {MAX_HEAD_SIZE} do not fit a program's registers"
    if problem.num_heads // problem.num_kv_heads > MAX_GROUP:
        return f"a tile holds up to {MAX_GROUP} query heads of a KV head"
    if problem.kv_cache_dtype not in (problem.dtype, torch.float8_e4m3fn):
        return f"a KV cache in {problem.kv_cache_dtype} with queries in {problem.dtype}: make it the same, or fp8 e4m3"
    return only_packed(problem) or _supports.kv_cache(problem)


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
    num_reqs, group = len(batch.seq_lens), query.shape[1] // kv_cache.shape[1]
    if len(query) == 0 or num_reqs == 0:
        return
    if _suits_prefill_sm90(query, kv_cache, batch, out, soft_cap, alibi_slopes, k_scale, v_scale):
        _prefill_sm90(query, kv_cache, batch, out, scale, left, right, sinks)
        return
    inputs = (
        query, query.stride(), kv_cache, kv_cache.stride(), out, out.stride(),
        batch.query_start_loc, batch.seq_lens, batch.block_table, batch.block_table.stride(), num_reqs,
        scale, soft_cap or None, alibi_slopes, sinks, k_scale, v_scale,
    )  # fmt: skip
    results = (out, out.stride(), batch.query_start_loc, batch.seq_lens, num_reqs, sinks, v_scale)
    few = batch.max_query_len * group <= (MAX_ROWS_FP32 if query.dtype == torch.float32 else VERIFY_ROWS)
    (_decode_or_verify if few else _prefill)(query, kv_cache, batch, left, right, inputs, results)


def _decode_or_verify(
    query: torch.Tensor, kv_cache: torch.Tensor, batch: PagedBatch, left: int | None, right: int | None,
    inputs: tuple, results: tuple,
) -> None:  # fmt: skip
    """inputs, results: the first arguments of the kernels that attend and merge."""
    num_kv_heads, block_size = kv_cache.shape[1:3]
    num_reqs, group, head_size = len(batch.seq_lens), query.shape[1] // num_kv_heads, query.shape[2]
    block_d = _launch.next_power_of_2(head_size)
    most_rows = batch.max_query_len * group
    rows = _rows(most_rows, group, query.dtype)
    several = rows > MIN_ROWS
    launch = "paged_attention_verify" if several else "paged_attention_decode"
    values = _launch.parameters(launch, query.device, (num_reqs * num_kv_heads) ** 2 * batch.max_seq_len)
    warps = values["warps"] * max(1, rows * block_d // WARPGROUP_RESULTS)
    if values["programs"] == 1 and kv_cache.dtype != query.dtype:
        warps = max(warps, WARPGROUP)  # converting takes registers, which a program that is alone can have
    block_n = _block_n(values, query)
    num_programs, turn = max(1, values["programs"] * _multiprocessors(query.device) // num_kv_heads), values["turn"]
    tickets, *plan = batch.once(_plan, num_kv_heads, num_programs, turn, left, block_n)
    parts = batch.once(_workspace, (num_programs + num_reqs) * num_kv_heads, rows, block_d)
    shape = {
        "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "HEAD_SIZE": head_size, "BLOCK_M": rows, "BLOCK_D": block_d,
        **_launch.overlap(query.device),
    }  # fmt: skip
    decode.attend_decode[(num_programs * num_kv_heads,)](
        *inputs, *parts, None if several else tickets, *plan, num_programs, turn,
        BLOCK_SIZE=block_size, LEFT=left, RIGHT=right, BLOCK_N=block_n,
        num_warps=warps, num_stages=values["stages"], **shape,
    )  # fmt: skip
    if several and num_programs > 1:
        borders = (num_programs - 1) * num_kv_heads
        decode.combine_verify[(borders, _launch.cdiv(most_rows, COMBINED_ROWS.value))](
            *results, *parts, *plan, num_programs, turn, num_warps=WARPGROUP, **shape
        )


def _prefill(
    query: torch.Tensor, kv_cache: torch.Tensor, batch: PagedBatch, left: int | None, right: int | None,
    inputs: tuple, results: tuple,
) -> None:  # fmt: skip
    """inputs, results: the first arguments of the kernels that attend and merge."""
    num_kv_heads, block_size = kv_cache.shape[1:3]
    num_tokens, num_heads, head_size = query.shape
    group, block_d = num_heads // num_kv_heads, _launch.next_power_of_2(head_size)
    values = _launch.parameters("paged_attention_prefill", query.device, num_tokens * num_heads)
    rows = _rows(values["rows"] * ROW_BYTES // max(ROW_BYTES, _row_bytes(query)), group, query.dtype)
    block_n = _block_n(values, query)
    num_items = (num_tokens // (rows // group) + len(batch.seq_lens)) * num_kv_heads
    shares = _launch.cdiv(_span(batch, left, right, rows // group), max(block_n, values["share"]))
    num_splits = max(1, min(values["programs"] * _multiprocessors(query.device) // num_items, shares))
    parts = (None, None)
    if num_splits > 1:
        parts = batch.once(_workspace, num_items * num_splits, rows, block_d)
    shape = {
        "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "HEAD_SIZE": head_size, "LEFT": left, "RIGHT": right,
        "BLOCK_M": rows, "BLOCK_N": block_n, "BLOCK_D": block_d, **_launch.overlap(query.device),
    }  # fmt: skip
    prefill.attend_prefill[(num_items * num_splits,)](
        *inputs, *parts, num_splits, values["share"],
        BLOCK_SIZE=block_size, SPLIT=num_splits > 1, num_warps=values["warps"], num_stages=values["stages"], **shape,
    )  # fmt: skip
    if num_splits > 1:
        most_rows = min(rows, batch.max_query_len * group)
        prefill.combine_prefill[(num_items, _launch.cdiv(most_rows, COMBINED_ROWS.value))](
            *results, *parts, num_splits, values["share"], num_warps=WARPGROUP, **shape
        )


def _suits_prefill_sm90(
    query: torch.Tensor, kv_cache: torch.Tensor, batch: PagedBatch, out: torch.Tensor,
    soft_cap: float, alibi_slopes: torch.Tensor | None, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None,
) -> bool:  # fmt: skip
    """Whether these inputs are for the kernel for Hopper GPUs."""
    if INTERPRETED or _launch.family(query.device) != "sm90":
        return False
    plain = not soft_cap and alibi_slopes is None and k_scale is None and v_scale is None
    halves = query.element_size() == SM90_BYTES and kv_cache.dtype == query.dtype
    boxes = query.shape[2] >= prefill_sm90.COLUMNS.value and kv_cache.shape[2] % MIN_ROWS == 0
    aligned = all(map(_is_aligned, (query, kv_cache, out)))
    return plain and halves and boxes and aligned and _fills_sm90(query, kv_cache, batch)


def _fills_sm90(query: torch.Tensor, kv_cache: torch.Tensor, batch: PagedBatch) -> bool:
    """Whether its tiles keep a Hopper GPU busy, where no keys are split."""
    num_kv_heads, programs = kv_cache.shape[1], _multiprocessors(query.device)
    most_rows = batch.max_query_len * (query.shape[1] // num_kv_heads)
    if most_rows > VERIFY_ROWS:
        return 2 * _num_sm90_tiles(query, kv_cache, batch) > programs
    many = len(batch.seq_lens) * num_kv_heads >= SEVERAL_TURNS * programs
    return most_rows > MIN_ROWS and many and batch.max_seq_len <= SEVERAL_KEYS


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether the copy engine could read it where it lies."""
    *strides, last = tensor.stride()
    places = [tensor.data_ptr(), *(stride * tensor.element_size() for stride in strides)]
    return last == 1 and not any(place % COPY_BYTES for place in places)


def _prefill_sm90(
    query: torch.Tensor, kv_cache: torch.Tensor, batch: PagedBatch, out: torch.Tensor,
    scale: float, left: int | None, right: int | None, sinks: torch.Tensor | None,
) -> None:  # fmt: skip
    num_kv_heads, block_size = kv_cache.shape[1:3]
    group, head_size = query.shape[1] // num_kv_heads, query.shape[2]
    block_d = _launch.next_power_of_2(head_size)
    span = _span(batch, left, right, prefill_sm90.ROWS.value // group)
    values = _launch.parameters("paged_attention_prefill_sm90", query.device, span)
    block_n = _block_n(values, query)
    box = [1, 1, math.gcd(block_size, block_n), prefill_sm90.COLUMNS.value]
    cache = TensorDescriptor.from_tensor(kv_cache, box, NVMMASharedLayout(128, 16, rank=len(box)))
    num_tiles = _num_sm90_tiles(query, kv_cache, batch)
    prefill_sm90.attend_prefill_sm90[(min(num_tiles, _multiprocessors(query.device)),)](
        query, query.stride(), cache, len(kv_cache), out, out.stride(),
        batch.query_start_loc, batch.seq_lens, batch.block_table, batch.block_table.stride(), len(batch.seq_lens),
        scale, sinks, num_tiles, batch.once(_tickets, 1),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_SIZE=head_size, BLOCK_SIZE=block_size, LEFT=left, RIGHT=right,
        BLOCK_N=block_n, BLOCK_D=block_d, STAGES=values["stages"],
        num_warps=WARPGROUP, **_launch.overlap(query.device),
    )  # fmt: skip


def _num_sm90_tiles(query: torch.Tensor, kv_cache: torch.Tensor, batch: PagedBatch) -> int:
    num_kv_heads = kv_cache.shape[1]
    queries = prefill_sm90.ROWS.value // (query.shape[1] // num_kv_heads)
    return (len(query) // queries + len(batch.seq_lens)) * num_kv_heads


def _span(batch: PagedBatch, left: int | None, right: int | None, queries: int) -> int:
    """The keys that so many queries in a row see, at most."""
    if left is None or right is None:
        return batch.max_seq_len
    return min(batch.max_seq_len, left + right + min(queries, batch.max_query_len))


def _plan(
    batch: PagedBatch, num_kv_heads: int, num_programs: int, turn: int, left: int | None, block_n: int
) -> tuple[torch.Tensor, ...]:
    """Tickets, and which keys each program of a step with few queries attends, for all layers with this window.

    Kernels read the plan before the one before them has ended. The first of them is right to do so because the tickets
    are made after the plan, used or not: when that kernel has begun, the plan has ended.
    """
    num_reqs, device = len(batch.seq_lens), batch.seq_lens.device
    starts = torch.empty(num_reqs + 2, dtype=torch.int32, device=device)
    first_requests = torch.empty(num_programs + 1, dtype=torch.int32, device=device)
    decode.plan[(1,)](
        batch.query_start_loc, batch.seq_lens, num_reqs, starts, first_requests, num_programs, turn,
        LEFT=left, BLOCK_N=block_n,
    )  # fmt: skip
    return _tickets(batch, num_reqs * num_kv_heads), starts, first_requests


def _row_bytes(query: torch.Tensor) -> int:
    return _launch.next_power_of_2(query.shape[2]) * query.element_size()


def _block_n(values: _launch.Parameters, query: torch.Tensor) -> int:
    """The keys of a tile."""
    return max(MIN_ROWS, values["keys"] * ROW_BYTES // max(ROW_BYTES, _row_bytes(query)))


def _rows(wanted: int, group: int, dtype: torch.dtype) -> int:
    """Of a query tile: a power of two that holds at least one token."""
    if dtype == torch.float32:
        wanted = min(wanted, MAX_ROWS_FP32)
    return _launch.next_power_of_2(max(MIN_ROWS, group, wanted))


def _workspace(batch: PagedBatch, num_parts: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial results, and their stats and totals. The layers of a step use it one after the other."""
    device = batch.seq_lens.device
    partials = torch.empty(num_parts, rows, columns, dtype=torch.float32, device=device)
    return partials, torch.empty(num_parts, rows, 2, dtype=torch.float32, device=device)


def most_workspace(
    num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, num_reqs: int, device: torch.device
) -> int:
    """Bytes of partial results, at most, in a step of so many requests. dtype: of the queries.

    A request that has several queries makes the tiles of all requests as large as its own.
    """
    group, columns = num_heads // num_kv_heads, _launch.next_power_of_2(head_size)

    def programs(launch: str) -> int:
        return max(values["programs"] for _, values in _launch.entries(launch, device)) * _multiprocessors(device)

    rows = [values["rows"] for _, values in _launch.entries("paged_attention_prefill", device)]
    rows_of_parts = [programs("paged_attention_prefill") * _rows(max(rows), group, dtype)]
    if group <= VERIFY_ROWS:
        for launch, wanted in (("paged_attention_decode", MIN_ROWS), ("paged_attention_verify", VERIFY_ROWS)):
            num_parts = (max(1, programs(launch) // num_kv_heads) + num_reqs) * num_kv_heads
            rows_of_parts.append(num_parts * _rows(wanted, group, dtype))
    return max(rows_of_parts) * (columns + len(("maximum", "total"))) * torch.float32.itemsize


def _tickets(batch: PagedBatch, num_tiles: int) -> torch.Tensor:
    """How many parts of each tile are there. Each layer of a step leaves the counts at zero for the next one."""
    return torch.zeros(num_tiles, dtype=torch.int32, device=batch.seq_lens.device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Of a GPU; in the interpreter a few, which cut the keys of its small batches just as well."""
    return 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
