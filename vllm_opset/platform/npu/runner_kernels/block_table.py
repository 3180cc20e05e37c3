"""The kernels of `vllm.v1.worker.gpu.block_table`."""

import torch

from vllm_opset.platform.npu.runner_kernels._pointers import pointed_at
from vllm_opset.platform.npu.runner_kernels._registry import implements
from vllm_opset.platform.npu.runner_kernels._rows import ragged


@implements("gpu.block_table._gather_block_tables_kernel", ignores="block_table_strides num_blocks")
def gather_block_tables(
    batch_idx_to_req_idx: torch.Tensor,
    src_block_table_ptrs: torch.Tensor,
    dst_block_table_ptrs: torch.Tensor,
    num_reqs: int,
    num_computed_tokens: torch.Tensor | None = None,
    sliding_window_reach: torch.Tensor | None = None,
    block_sizes: torch.Tensor | None = None,
    MASK_SLIDING_WINDOW: bool = False,
) -> None:
    """Copy the block table's rows of the requests in a batch, for each group of layers, and clear the other rows.

    Rows are copied whole, because the device alone knows how many blocks are valid, and no one reads behind them.
    Blocks that a sliding window has left become block 0, which holds no tokens.
    """
    requests = batch_idx_to_req_idx[:num_reqs]
    if MASK_SLIDING_WINDOW:
        reach = sliding_window_reach[:, None]
        left = (num_computed_tokens[requests] - reach).clamp_(min=0) // block_sizes[:, None]
        left.masked_fill_(reach == 0, 0)
    for group, table in enumerate(pointed_at(dst_block_table_ptrs)):
        rows = pointed_at(src_block_table_ptrs)[group][requests]
        if MASK_SLIDING_WINDOW:
            columns = torch.arange(rows.shape[1], device=rows.device)
            rows.masked_fill_(columns < left[group, :, None], 0)
        table[:num_reqs] = rows
        table[num_reqs:].zero_()


@implements(
    "gpu.block_table._compute_slot_mappings_kernel",
    ignores="max_num_tokens block_table_strides cp_rank CP_INTERLEAVE dcp_sharded",
)
def compute_slot_mappings(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    pos: torch.Tensor,
    block_table_ptrs: torch.Tensor,
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
    num_tokens, starts = len(pos), query_start_loc[: len(idx_mapping) + 1]
    rows, places = ragged(starts, num_tokens)
    requests = idx_mapping[rows]
    owned = (requests >= 0) & (places < starts.diff()[rows]) & slot_mapping_enabled[:, None]
    requests = requests.clamp(min=0)
    sizes = (block_sizes if kernel_block_sizes is None else kernel_block_sizes)[:, None]
    # Positions behind the last token, and those of groups without slots, may lie behind the table's last block.
    numbers = [
        table[requests, columns.clamp(max=table.shape[1] - 1)]
        for table, columns in zip(pointed_at(block_table_ptrs), pos // sizes, strict=True)
    ]
    slots = torch.stack(numbers).long() * sizes + pos % sizes
    slot_mappings[:, :num_tokens] = slots.masked_fill_(~owned, PAD_ID)
    slot_mappings[:, num_tokens:].fill_(PAD_ID)
