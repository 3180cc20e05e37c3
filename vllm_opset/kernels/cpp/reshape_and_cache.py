"""reshape_and_cache by copying each head's key and value to its slot."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.cpp._build import INT, POINTER, function
from vllm_opset.kernels.cpu import reshape_and_cache as in_torch
from vllm_opset.ops.attention.paged_batch import refuse_split_kv
from vllm_opset.ops.cache.reshape_and_cache import ReshapeAndCacheProblem, check_arguments

run = function("reshape_and_cache", *[POINTER] * 4, *[INT] * 12, returns=INT)


def supports(problem: ReshapeAndCacheProblem) -> str | None:
    """Caches of the keys' own dtype, whichever."""
    if problem.kv_cache_dtype != problem.dtype:
        return f"it copies, and {problem.dtype} to {problem.kv_cache_dtype} must be converted"
    return refuse_split_kv(problem)


@kernel(ops.reshape_and_cache, name="cpp", supports=supports)
def reshape_and_cache(key, value, kv_cache, slot_mapping, k_scale=None, v_scale=None) -> None:
    copies = key.dtype == value.dtype == kv_cache.dtype
    if not copies or not key.stride(2) == value.stride(2) == kv_cache.stride(3) == 1:
        return in_torch.reshape_and_cache(key, value, kv_cache, slot_mapping, k_scale, v_scale)
    check_arguments(key, value, kv_cache, slot_mapping)
    slots = slot_mapping.to(torch.int64).contiguous()
    size = key.element_size()
    num_blocks, num_kv_heads, block_size, width = kv_cache.shape
    strides = (*key.stride()[:2], *value.stride()[:2])
    cache_block, cache_head, cache_slot = (stride * size for stride in kv_cache.stride()[:3])
    beyond_cache = run(
        key.data_ptr(), value.data_ptr(), kv_cache.data_ptr(), slots.data_ptr(),
        len(slots), num_kv_heads, width // 2 * size, *(stride * size for stride in strides),
        num_blocks * block_size, block_size, cache_block, cache_head, cache_slot,
    )  # fmt: skip
    if beyond_cache >= 0:
        raise IndexError(f"slot {slots[beyond_cache]} of token {beyond_cache} is not one of {num_blocks * block_size}")
