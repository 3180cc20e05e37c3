"""The kernels of `vllm.v1.worker.gpu.block_table`."""

import numpy as np
import torch

from vllm_opset.platform.cpu.runner_kernels._memory import differences, int32_at
from vllm_opset.platform.cpu.runner_kernels._registry import implements


@implements("gpu.block_table._gather_block_tables_kernel")
def gather_block_tables(
    batch_idx_to_req_idx: torch.Tensor,
    src_block_table_ptrs: torch.Tensor,
    dst_block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    num_blocks: torch.Tensor,
    num_reqs: int,
    num_computed_tokens: torch.Tensor | None = None,
    sliding_window_reach: torch.Tensor | None = None,
    block_sizes: torch.Tensor | None = None,
    MASK_SLIDING_WINDOW: bool = False,
) -> None:
    """Copy the block table's rows of the requests in a batch, for each group of layers.

    num_blocks: int32 [num_groups, max_num_reqs]. Blocks that a sliding window has left become block 0, which holds no
    tokens. The kernel also clears rows that pad a batch for a CUDA graph; on a CPU, no batch is padded.
    """
    requests = batch_idx_to_req_idx.numpy()[:num_reqs]
    tables = (block_table_strides, src_block_table_ptrs, dst_block_table_ptrs)
    for group, (stride, source, target) in enumerate(zip(*(of.tolist() for of in tables), strict=True)):
        width = max(num_blocks.numpy()[group, requests].tolist(), default=0)
        source = int32_at(source, num_blocks.shape[1], stride)
        target = int32_at(target, num_reqs, stride)
        target[:, :width] = source[requests, :width]
        if MASK_SLIDING_WINDOW and (reach := int(sliding_window_reach[group])):
            left = np.maximum(num_computed_tokens.numpy()[requests] - reach, 0) // int(block_sizes[group])
            target[:, :width][np.arange(width) < left[:, None]] = 0


@implements("gpu.block_table._compute_slot_mappings_kernel", ignores="max_num_tokens cp_rank CP_INTERLEAVE dcp_sharded")
def compute_slot_mappings(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    pos: torch.Tensor,
    block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    block_sizes: torch.Tensor,
    slot_mapping_enabled: torch.Tensor,
    slot_mappings: torch.Tensor,
    CP_SIZE: int,
    PAD_ID: int,
    kernel_block_sizes: torch.Tensor | None = None,
) -> None:
    """The slot of each token's key and value in the cache, for each group of layers.

    slot_mappings: int64 [num_groups, max_num_tokens]. PAD_ID stands for tokens of requests that own no blocks, whose
    idx_mapping is negative, for groups without slots, and behind the last token. CP_SIZE is 1: context parallelism is
    refused.
    """
    assert CP_SIZE == 1
    requests = idx_mapping.numpy().repeat(differences(query_start_loc[: len(idx_mapping) + 1]))
    num_tokens = len(requests)
    positions = pos.numpy()[:num_tokens]
    rows = max([0, *idx_mapping.tolist()]) + 1
    for group, enabled in enumerate(slot_mapping_enabled.tolist()):
        slots = slot_mappings.numpy()[group]
        slots[num_tokens if enabled else 0 :] = PAD_ID
        if not enabled:
            continue
        block_size = int((block_sizes if kernel_block_sizes is None else kernel_block_sizes)[group])
        table = int32_at(block_table_ptrs.tolist()[group], rows, block_table_strides.tolist()[group])
        blocks, offsets = np.divmod(positions, block_size)
        np.multiply(table[requests, blocks], block_size, out=slots[:num_tokens], dtype=np.int64)
        slots[:num_tokens] += offsets
        slots[:num_tokens][requests < 0] = PAD_ID
