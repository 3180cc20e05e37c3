"""reshape_and_cache by copying each head's key and value to its place."""

import ctypes

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.cpp._build import INT, POINTER, function
from vllm_opset.kernels.cpu import reshape_and_cache as in_torch
from vllm_opset.ops.reshape_and_cache import ReshapeAndCacheProblem, check_shapes

run = function("reshape_and_cache", *[POINTER] * 4, *[INT] * 12, POINTER)


def supports(problem: ReshapeAndCacheProblem) -> str | None:
    """Caches of the keys' own dtype, whichever."""
    if problem.kv_cache_dtype != problem.dtype:
        return f"it copies, and {problem.dtype} to {problem.kv_cache_dtype} must be converted"
    return None


@kernel(ops.reshape_and_cache, name="cpp", supports=supports)
def reshape_and_cache(key, value, kv_cache, slot_mapping, k_scale=None, v_scale=None) -> None:
    if not key.stride(2) == value.stride(2) == kv_cache.stride(3) == 1:
        return in_torch.reshape_and_cache(key, value, kv_cache, slot_mapping, k_scale, v_scale)
    check_shapes(key, value, kv_cache, slot_mapping)
    slots = slot_mapping.to(torch.int64).contiguous()
    size = key.element_size()
    num_blocks, num_kv_heads, block_size, width = kv_cache.shape
    strides = (*key.stride()[:2], *value.stride()[:2])
    cache_block, cache_head, cache_slot = (stride * size for stride in kv_cache.stride()[:3])
    bad = ctypes.c_int64()
    run(
        key.data_ptr(), value.data_ptr(), kv_cache.data_ptr(), slots.data_ptr(),
        len(slots), num_kv_heads, width // 2 * size, *(stride * size for stride in strides),
        num_blocks * block_size, block_size, cache_block, cache_head, cache_slot, ctypes.addressof(bad),
    )  # fmt: skip
    if bad.value >= 0:
        raise IndexError(f"slot {slots[bad.value]} of token {bad.value} is not one of {num_blocks * block_size}")
