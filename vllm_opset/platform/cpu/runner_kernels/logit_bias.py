"""The kernel of `vllm.v1.worker.gpu.sample.logit_bias`."""

import torch

from vllm_opset.platform.cpu.runner_kernels._registry import implements


@implements("gpu.sample.logit_bias._bias_kernel", ignores="vocab_size")
def bias(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    num_allowed_token_ids: torch.Tensor,
    allowed_token_ids: torch.Tensor,
    num_logit_bias: torch.Tensor,
    bias_token_ids: torch.Tensor,
    bias: torch.Tensor,
    pos: torch.Tensor,
    min_lens: torch.Tensor,
    num_stop_token_ids: torch.Tensor,
    restore_when_all_masked: torch.Tensor,
    stop_token_ids: torch.Tensor,
    CHECK_ALL_MASKED_ROWS: bool,
) -> None:
    """Keep allowed tokens, add the bias, and forbid stop tokens in answers that are too short, in place.

    If a request says so in restore_when_all_masked, its stop tokens stay where no other token is left.
    """
    for row, (request, position) in enumerate(zip(expanded_idx_mapping.tolist(), pos.tolist(), strict=True)):
        scores = logits[row]
        if count := int(num_allowed_token_ids[request]):
            allowed = allowed_token_ids[request, :count].long()
            kept = scores[allowed]
            scores.fill_(-torch.inf)[allowed] = kept
        if count := int(num_logit_bias[request]):
            scores[bias_token_ids[request, :count].long()] += bias[request, :count].to(scores.dtype)
        count = int(num_stop_token_ids[request])
        if count and position + 1 < int(min_lens[request]):
            stops = stop_token_ids[request, :count].long()
            kept = scores[stops]
            scores[stops] = -torch.inf
            restores = CHECK_ALL_MASKED_ROWS and bool(restore_when_all_masked[request])
            if restores and scores.amax() == -torch.inf:
                scores[stops] = torch.where(kept < torch.inf, kept, -torch.inf)
