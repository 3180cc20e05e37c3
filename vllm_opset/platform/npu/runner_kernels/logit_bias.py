"""The kernel of `vllm.v1.worker.gpu.sample.logit_bias`."""

import torch

from vllm_opset.platform.npu.runner_kernels._registry import implements
from vllm_opset.platform.npu.runner_kernels._sampling import spread, tokens_of, up_to


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
    requests, vocab_size = expanded_idx_mapping, logits.shape[1]

    def listed(counts: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tokens[requests], up_to(counts[requests], tokens.shape[1])

    allowed = tokens_of(*listed(num_allowed_token_ids, allowed_token_ids), vocab_size)
    restricted = (num_allowed_token_ids[requests] > 0)[:, None]
    logits.masked_fill_(restricted & ~allowed, -torch.inf)

    logits += spread(*listed(num_logit_bias, bias_token_ids), bias[requests], vocab_size).to(logits.dtype)

    short = (pos + 1 < min_lens[requests])[:, None]
    stops = tokens_of(*listed(num_stop_token_ids, stop_token_ids), vocab_size) & short
    if CHECK_ALL_MASKED_ROWS:
        nothing_left = logits.masked_fill(stops, -torch.inf).amax(1) == -torch.inf
        stay = nothing_left & (restore_when_all_masked[requests] != 0)
        stops &= ~(stay[:, None] & (logits < torch.inf))
    logits.masked_fill_(stops, -torch.inf)
