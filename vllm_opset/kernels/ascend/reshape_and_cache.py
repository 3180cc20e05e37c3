"""reshape_and_cache by ATB's _npu_reshape_and_cache, or by npu_scatter_pa_kv_cache on A5, in fp32 and by override.

The kernel "ascend" uses _npu_reshape_and_cache, which is not in docs. Slots must be int32, because int64 slots write
nothing (vllm-ascend #706). So slots of another dtype are converted on the device. ATB's own test skips negative slots.

The kernel "ascend_scatter" uses npu_scatter_pa_kv_cache. Source: its docs, cache_mode "Norm" for caches in ND. All
tensors are contiguous and of one dtype. Slots are int32 or int64, in [0, num_blocks * block_size − 1], none twice. So a
token without a slot gets a slot that no token has, and writes the present contents of that slot. This reads nothing
back and costs a dozen small operators.
"""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.ascend import _cache, _constraints
from vllm_opset.kernels.ascend._operators import atb, npu
from vllm_opset.ops.cache.reshape_and_cache import ReshapeAndCacheProblem, check_arguments


def supports(problem: ReshapeAndCacheProblem) -> str | None:
    """bf16 and fp16 on A2 and A3; split KV layout, in the same dtype."""
    return _cache.supports(problem) or _constraints.refused("_npu_reshape_and_cache", problem, "atb")


@kernel(ops.reshape_and_cache, name="ascend", supports=supports)
def reshape_and_cache(key, value, kv_cache, slot_mapping, k_scale=None, v_scale=None) -> None:
    check_arguments(key, value, kv_cache, slot_mapping)
    caches, num_tokens = _cache.caches(kv_cache), len(slot_mapping)
    if num_tokens:
        new = key[:num_tokens].contiguous(), value[:num_tokens].contiguous()
        atb._npu_reshape_and_cache(
            *new, *caches, slot_indices=slot_mapping.to(_constraints.ATB_SLOT_DTYPE).contiguous()
        )


def supports_scatter(problem: ReshapeAndCacheProblem) -> str | None:
    """fp32, bf16 and fp16 on A2, A3 and A5; split KV layout, in the same dtype."""
    return _cache.supports(problem) or _constraints.refused("npu_scatter_pa_kv_cache", problem)


@kernel(ops.reshape_and_cache, name="ascend_scatter", supports=supports_scatter)
def scatter(key, value, kv_cache, slot_mapping, k_scale=None, v_scale=None) -> None:
    check_arguments(key, value, kv_cache, slot_mapping)
    caches, num_tokens = _cache.caches(kv_cache), len(slot_mapping)
    if num_tokens:
        slots, without_slot = _distinct(slot_mapping.long(), caches[0].shape[:2].numel())
        new = (
            torch.where(without_slot[:, None, None], cache.flatten(0, 1).index_select(0, slots), tokens[:num_tokens])
            for cache, tokens in zip(caches, (key, value), strict=True)
        )
        npu.npu_scatter_pa_kv_cache(*new, *caches, slots, cache_mode="Norm")


def _distinct(slots: torch.Tensor, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots, with a free slot for each token that has none, and a mask of these tokens.

    Among twice as many slots as tokens, enough are free. The n-th token without a slot gets the n-th free slot.
    """
    without_slot = slots < 0
    candidates = min(2 * len(slots), num_slots)
    taken = torch.zeros(candidates + 1, dtype=torch.int64, device=slots.device)
    taken.index_fill_(0, torch.where(without_slot, candidates, slots.clamp(max=candidates)), 1)
    free = (1 - taken[:candidates]).cumsum(0)
    return torch.where(without_slot, torch.searchsorted(free, without_slot.cumsum(0)), slots), without_slot
