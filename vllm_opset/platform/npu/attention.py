"""opset's attention with separate keys and values, as the NPU's operators need them (`kernels/ascend/_cache.py`)."""

import dataclasses
from typing import ClassVar

import torch
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_opset.attention.backend import OpsetAttentionBackend
from vllm_opset.attention.impl import OpsetAttentionImpl
from vllm_opset.kernels.ascend._constraints import ATTENTION_BLOCK_SIZES


class NpuAttentionImpl(OpsetAttentionImpl):
    split_kv_layout = True


class NpuAttentionBackend(OpsetAttentionBackend):
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_impl_cls() -> type[OpsetAttentionImpl]:
        return NpuAttentionImpl

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return list(ATTENTION_BLOCK_SIZES)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple:
        """One piece of memory for each layer, which `split_kv_cache` divides. vLLM calls this from 0.29 on."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.LBHNC,)


def split_kv_cache(kv_cache: torch.Tensor) -> torch.Tensor:
    """View a layer's KV cache with all keys before all values: [num_blocks, num_kv_heads, block_size, 2, head_size].

    kv_cache: vLLM's layout, [num_blocks, num_kv_heads, block_size, 2 * head_size], in one piece. It must be unused so
    far. Raises ValueError for a cache in several pieces, which vLLM makes if layers share blocks.
    """
    if not kv_cache.is_contiguous():
        raise ValueError(
            f"a layer's KV cache {list(kv_cache.shape)} with strides {list(kv_cache.stride())} is not in one piece of "
            "memory, and cannot have the split KV layout: choose another model"
        )
    num_blocks, num_kv_heads, block_size, width = kv_cache.shape
    return kv_cache.view(2, num_blocks, block_size, num_kv_heads, width // 2).permute(1, 3, 2, 0, 4)


def change_blocks(runner, scheduler_output: SchedulerOutput) -> SchedulerOutput:
    """Zero and copy the blocks that a scheduler's output names, before a step. Returns the output without these blocks.

    vLLM's own code for this uses Triton, or (until 0.28) treats a block as one piece of memory.
    """
    to_zero, copies = scheduler_output.new_block_ids_to_zero, scheduler_output.kv_cache_block_copies
    if not to_zero and not copies:
        return scheduler_output
    prepare_blocks(runner.kv_caches, runner.kv_cache_config.num_blocks, to_zero, copies)
    return dataclasses.replace(scheduler_output, new_block_ids_to_zero=None, kv_cache_block_copies=None)


def prepare_blocks(
    kv_caches: list[torch.Tensor], num_blocks: int, to_zero: list[int] | None, copies: list | None
) -> None:
    """Zero blocks, and then copy some (from, to). One of vLLM's num_blocks may be several of the kernels' blocks.

    Layers may share a cache, which is then processed once: a second pass could copy from a block that the first has
    overwritten.
    """
    for kv_cache in {kv_cache.data_ptr(): kv_cache for kv_cache in kv_caches}.values():
        blocks = kv_cache.unflatten(0, (num_blocks, -1))
        if to_zero:
            blocks[torch.tensor(to_zero, device=kv_cache.device)] = 0
        if copies:
            sources, targets = torch.tensor(copies, device=kv_cache.device).unbind(1)
            blocks[targets] = blocks[sources]
