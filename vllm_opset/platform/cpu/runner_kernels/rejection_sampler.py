"""The kernels of `vllm.v1.worker.gpu.spec_decode.rejection_sampler`.

A request has a row of logits for its last token, and one for each draft behind it. They are the rows from
`cu_num_logits[i]` to `cu_num_logits[i + 1]`.
"""

import torch

from vllm_opset.platform.cpu.runner_kernels._memory import ragged
from vllm_opset.platform.cpu.runner_kernels._registry import implements_for_drafts as implements

PLACEHOLDER = -1  # stands for a draft that is always rejected


@implements("gpu.spec_decode.rejection_sampler._gather_draft_sampled_kernel", ignores="num_logits")
def gather_draft_sampled(
    draft_sampled: torch.Tensor,
    pos: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    logits_indices: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    prefill_len: torch.Tensor,
) -> None:
    """The input token of each row of the logits, and its position. Drafts before the end of a prefill are none."""
    torch.index_select(positions, 0, logits_indices, out=pos)
    torch.index_select(input_ids, 0, logits_indices, out=draft_sampled)
    places = expanded_local_pos
    draft_sampled[(places > 0) & (pos - places < prefill_len[expanded_idx_mapping])] = PLACEHOLDER


@implements("gpu.spec_decode.rejection_sampler._flatten_sampled_kernel")
def flatten_sampled(
    flat_sampled: torch.Tensor, sampled: torch.Tensor, num_sampled: torch.Tensor, cu_num_logits: torch.Tensor
) -> None:
    """The sampled tokens, each in its row of the logits. sampled: [num_reqs, num_drafts + 1]."""
    rows, places = ragged(num_sampled.numpy())
    flat_sampled.numpy()[cu_num_logits.numpy()[rows] + places] = sampled.numpy()[rows, places]
