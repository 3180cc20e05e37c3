"""reshape_and_cache: each program copies some heads of keys and values. It loads them before it knows their slots."""

import torch
import triton
import triton.language as tl

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _launch, _supports
from vllm_opset.kernels.triton._cache import slot_start, to_cache_dtype
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._rows import EVICT_LAST, enough_warps
from vllm_opset.ops.attention.paged_batch import refuse_split_kv
from vllm_opset.ops.cache.reshape_and_cache import ReshapeAndCacheProblem, check_arguments


def supports(problem: ReshapeAndCacheProblem) -> str | None:
    """fp32, bf16 and fp16; a KV cache of these or, from compute capability 8.9 on, of fp8 e4m3."""
    return refuse_split_kv(problem) or _supports.kv_cache(problem)


@kernel(ops.reshape_and_cache, name="triton", supports=supports)
def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    check_arguments(key, value, kv_cache, slot_mapping)
    total, head_size = len(slot_mapping) * key.shape[1], key.shape[2]
    values = _launch.parameters("reshape_and_cache", key.device, total)
    block = _launch.next_power_of_2(head_size)
    held = max(1, values["tile"] // block)
    _launch.launch(
        _reshape_and_cache, (_launch.cdiv(total, held),),
        key, key.stride(), value, value.stride(), kv_cache, kv_cache.stride(), slot_mapping, slot_mapping.stride(0),
        k_scale, v_scale, total,
        NUM_KV_HEADS=key.shape[1], HEAD_SIZE=head_size, BLOCK_SIZE=kv_cache.shape[2],
        FP8=kv_cache.dtype == torch.float8_e4m3fn, ROWS=held, BLOCK=block,
        num_warps=enough_warps(values["warps"], held * block), **_launch.launch_options(key.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["total"])
def _reshape_and_cache(
    key, key_strides, value, value_strides, kv_cache, cache_strides, slot_mapping, slot_stride,
    k_scale, v_scale, total,
    NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, FP8: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < total) & (column < HEAD_SIZE)
    token, head = (row // NUM_KV_HEADS).to(tl.int64), row % NUM_KV_HEADS
    key += token * key_strides[0] + head * key_strides[1] + column * key_strides[2]
    value += token * value_strides[0] + head * value_strides[1] + column * value_strides[2]
    k, v = tl.load(key, mask, eviction_policy=EVICT_LAST), tl.load(value, mask, eviction_policy=EVICT_LAST)
    slot = tl.load(slot_mapping + token * slot_stride, row < total, -1)
    start = slot_start(kv_cache, cache_strides, slot, head, BLOCK_SIZE)
    mask = mask & (slot >= 0)
    tl.store(start + column * cache_strides[3], to_cache_dtype(k, k_scale, FP8), mask)
    tl.store(start + (HEAD_SIZE + column) * cache_strides[3], to_cache_dtype(v, v_scale, FP8), mask)
