"""The kernel of `vllm.v1.worker.gpu.structured_outputs`."""

import torch

from vllm_opset.platform.npu.runner_kernels._registry import implements
from vllm_opset.platform.npu.runner_kernels._rows import owners


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
    requests, places = logits_indices // MASK_STRIDE, logits_indices % MASK_STRIDE
    starts = cu_num_logits[requests]
    rows = (starts + places).masked_fill_(starts + places >= cu_num_logits[requests + 1], -1)
    masks = owners(rows, len(logits))
    bits = (1 << torch.arange(8, device=logits.device)).to(torch.uint8)
    forbidden = ((bitmask.view(torch.uint8)[:, :, None] & bits) == 0).view(len(bitmask), -1)
    forbidden = forbidden[masks.clamp(min=0), :vocab_size] & (masks >= 0)[:, None]
    logits.masked_fill_(forbidden, -torch.inf)
