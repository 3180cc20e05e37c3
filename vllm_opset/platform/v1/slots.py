"""The slot mapping of new tokens' keys and values: vLLM's block tables with opset's kernel."""

from types import MethodType

import torch
from vllm.v1.worker.block_table import BlockTable, MultiGroupBlockTable, SlotMappingMode

from vllm_opset import ops, selection
from vllm_opset.ops.contract import Problem


def bind(block_tables: MultiGroupBlockTable) -> None:
    """Replace `compute_slot_mapping` of these block tables, and of no others."""
    for block_table in block_tables.block_tables:
        device = block_table.slot_mapping.gpu.device.type
        block_table.opset_kernel = selection.select(ops.compute_slot_mapping, Problem(device, torch.int64)).run
        block_table.compute_slot_mapping = MethodType(compute_slot_mapping, block_table)


def tables(runner) -> list[torch.Tensor]:
    """The block table of each group of layers, on the device, with one row."""
    return [table.get_device_tensor(1) for table in runner.input_batch.block_table.block_tables]


def compute_slot_mapping(
    self: BlockTable, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor
) -> None:
    """See `ops.compute_slot_mapping`."""
    if self.slot_mapping_mode != SlotMappingMode.NONE:
        self.opset_kernel(query_start_loc, positions, self.block_table.gpu, self.block_size, self.slot_mapping.gpu)
