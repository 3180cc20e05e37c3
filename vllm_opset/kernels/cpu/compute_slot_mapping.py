"""compute_slot_mapping in NumPy, because small operations in NumPy cost a tenth of PyTorch's."""

import numpy as np
import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.ops.cache.compute_slot_mapping import PADDING, check_arguments


@kernel(ops.compute_slot_mapping, name="cpu")
def compute_slot_mapping(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    slot_mapping: torch.Tensor,
) -> None:
    check_arguments(query_start_loc, positions, block_table, slot_mapping)
    num_tokens, num_reqs = len(positions), len(query_start_loc) - 1
    requests = np.arange(num_reqs).repeat(np.diff(query_start_loc.numpy()))
    blocks, offsets = np.divmod(positions.numpy(), block_size)
    slots = slot_mapping.numpy()
    np.multiply(block_table.numpy()[requests, blocks], block_size, out=slots[:num_tokens], dtype=np.int64)
    slots[:num_tokens] += offsets
    slots[num_tokens:] = PADDING
