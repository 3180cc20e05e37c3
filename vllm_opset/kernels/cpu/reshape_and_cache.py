"""reshape_and_cache on a CPU: one indexed write for key and value together."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.ops.attention.paged_batch import refuse_split_kv
from vllm_opset.ops.cache.reshape_and_cache import ReshapeAndCacheProblem, check_arguments, to_cache_dtype


def supports(problem: ReshapeAndCacheProblem) -> str | None:
    """Everything in the contract but the split KV layout."""
    return refuse_split_kv(problem)


@kernel(ops.reshape_and_cache, name="cpu", supports=supports)
def reshape_and_cache(key, value, kv_cache, slot_mapping, k_scale=None, v_scale=None) -> None:
    check_arguments(key, value, kv_cache, slot_mapping)
    num_tokens = len(slot_mapping)
    if key.shape[0] != num_tokens:
        key, value = key[:num_tokens], value[:num_tokens]
    # Finding the smallest slot takes a microsecond. Selecting the tokens with slots would take ten in every step.
    if num_tokens and int(slot_mapping.min()) < 0:
        kept = slot_mapping >= 0
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    if kv_cache.dtype != key.dtype:
        key, value = to_cache_dtype(key, k_scale, kv_cache.dtype), to_cache_dtype(value, v_scale, kv_cache.dtype)
    block_size = kv_cache.shape[2]
    place = slot_mapping // block_size, slot_mapping % block_size
    kv_cache.transpose(1, 2).index_put_(place, torch.cat((key, value), dim=-1))
