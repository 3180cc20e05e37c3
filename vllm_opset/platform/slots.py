"""Where each new token's key and value go: the slot mapping, which vLLM computes by a Triton kernel."""

from types import MethodType

import numpy as np
import torch
from vllm.v1.worker.block_table import BlockTable, MultiGroupBlockTable, SlotMappingMode


def bind(block_tables: MultiGroupBlockTable) -> None:
    """Gives these block tables, and no others, the method below."""
    for block_table in block_tables.block_tables:
        block_table.compute_slot_mapping = MethodType(compute_slot_mapping, block_table)


def compute_slot_mapping(
    self: BlockTable, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor
) -> None:
    """slot = block_table[request, position // block_size] * block_size + position % block_size, for every new token.

    query_start_loc: [num_reqs + 1] int32. positions: [num_tokens] int64. The result goes to the first num_tokens
    elements of the table's slot_mapping, int64.
    """
    if self.slot_mapping_mode == SlotMappingMode.NONE:
        return
    positions = positions.numpy()
    num_tokens = len(positions)
    requests = np.arange(num_reqs)
    if num_tokens != num_reqs:
        requests = np.repeat(requests, np.diff(query_start_loc.numpy()))
    blocks, offsets = np.divmod(positions, self.block_size)
    slots = self.slot_mapping.np[:num_tokens]
    np.multiply(self.block_table.np[requests, blocks], self.block_size, out=slots)
    slots += offsets
