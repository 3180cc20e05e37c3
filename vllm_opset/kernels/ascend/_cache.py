"""The KV cache for the NPU's operators: two tensors, [num_blocks, block_size, num_kv_heads, head_size] each.

The operators take only contiguous tensors (docs of npu_scatter_pa_kv_cache and npu_fused_infer_attention_score). A
cache that holds each value beside its key cannot be viewed as two contiguous tensors. So the NPU platform allocates one
storage for each layer, [2, num_blocks, block_size, num_kv_heads, head_size], keys first. It gives the kernels the view

    storage.permute(1, 3, 2, 0, 4)    # [num_blocks, num_kv_heads, block_size, 2, head_size]

which is the contract's cache in the split KV layout (`ops.paged_batch`). `supports` refuses a cache with each value
beside its key. The call refuses a split cache in another layout.
"""

import torch

from vllm_opset.ops.attention.paged_attention import PagedAttentionProblem
from vllm_opset.ops.attention.paged_batch import keys_and_values
from vllm_opset.ops.cache.reshape_and_cache import ReshapeAndCacheProblem

LAYOUT = "[2, num_blocks, block_size, num_kv_heads, head_size]"


def supports(problem: PagedAttentionProblem | ReshapeAndCacheProblem) -> str | None:
    """The split KV layout, in the dtype of the activations."""
    if not problem.split_kv_layout:
        return f"the KV cache must have the split layout: allocate it as {LAYOUT} and pass its view of 5 dimensions"
    if problem.kv_cache_dtype != problem.dtype:
        return (
            f"a KV cache in {problem.kv_cache_dtype} with activations in {problem.dtype}: leave --kv-cache-dtype auto"
        )
    return None


def caches(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The key cache and the value cache as contiguous views. Raises ValueError for a cache in another layout."""
    key_cache, value_cache = (half.transpose(1, 2) for half in keys_and_values(kv_cache))
    if not key_cache.is_contiguous() or not value_cache.is_contiguous():
        raise ValueError(
            f"a KV cache {list(kv_cache.shape)} with strides {list(kv_cache.stride())} does not hold keys and values "
            f"in one piece each: allocate it as {LAYOUT} and pass .permute(1, 3, 2, 0, 4) of that"
        )
    return key_cache, value_cache
