"""The kernel of `vllm.v1.worker.gpu.structured_outputs`."""

import numpy as np
import torch

from vllm_opset.platform.cpu.runner_kernels._memory import bits
from vllm_opset.platform.cpu.runner_kernels._registry import implements


@implements("gpu.structured_outputs._apply_grammar_bitmask_kernel")
def apply_grammar_bitmask(
    logits: torch.Tensor,
    logits_indices: torch.Tensor,
    cu_num_logits: torch.Tensor,
    bitmask: torch.Tensor,
    vocab_size: int,
    MASK_STRIDE: int,
) -> None:
    """Set the logits of tokens that the grammar forbids to -inf, in place.

    bitmask: int32 [num_masks, ceil(vocab_size / 32)], a bit 1 for an allowed token, the lowest bit first.
    logits_indices: int32 [num_masks]. MASK_STRIDE times a request's place in the batch, plus a row of its logits.
    """
    requests, places = np.divmod(logits_indices.numpy(), MASK_STRIDE)
    starts = cu_num_logits.numpy()
    active = np.flatnonzero(places < starts[requests + 1] - starts[requests])
    rows = torch.from_numpy(starts[requests[active]] + places[active])
    for row, allowed in zip(rows, bits(bitmask.numpy()[active], vocab_size), strict=True):
        logits[row].masked_fill_(torch.from_numpy(allowed == 0), -torch.inf)
