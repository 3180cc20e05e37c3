"""The kernels of `vllm.v1.worker.gpu.sample.penalties`."""

import torch

from vllm_opset.platform.npu.runner_kernels._registry import implements
from vllm_opset.platform.npu.runner_kernels._sampling import spread, tokens_of


@implements("gpu.sample.penalties._penalties_kernel")
def penalties(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    token_ids: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    prompt_bin_mask: torch.Tensor,
    output_bin_counts: torch.Tensor,
    vocab_size: int,
) -> None:
    """Apply the three penalties to the logits, in place. Drafts before a row count as answered.

    token_ids: the input of each row. output_bin_counts: how often the answer has each token.

    prompt_bin_mask: int32 [max_num_reqs, ceil(vocab_size / 32)]. The prompt's tokens set their bits, the lowest first.
    """
    requests = expanded_idx_mapping
    repetition, frequency, presence = (
        penalty[requests, None] for penalty in (repetition_penalty, frequency_penalty, presence_penalty)
    )
    rows = torch.arange(len(requests), device=logits.device)
    before = (
        (rows <= rows[:, None]) & (rows > (rows - expanded_local_pos)[:, None]) & (token_ids >= 0)
    )  # −1 is no draft
    drafts = spread(token_ids.expand_as(before), before, before.int(), vocab_size)
    counts = output_bin_counts[requests, :vocab_size] + drafts
    answered = counts > 0
    bits = (1 << torch.arange(8, device=logits.device)).to(torch.uint8)  # an NPU's arange makes no uint8
    prompted = ((prompt_bin_mask.view(torch.uint8)[requests, :, None] & bits) != 0).flatten(1)[:, :vocab_size]
    scale = torch.where(prompted | answered, repetition, torch.ones_like(repetition))
    scores = logits[:, :vocab_size].float()
    scores *= torch.where(scores > 0, 1.0 / scale, scale)
    scores -= frequency * counts
    scores -= presence * answered
    logits[:, :vocab_size] = scores.to(logits.dtype)


@implements("gpu.sample.penalties._bincount_kernel")
def bincount(
    expanded_idx_mapping: torch.Tensor,
    all_token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    prefill_len: torch.Tensor,
    prompt_bin_mask: torch.Tensor,
    output_bin_counts: torch.Tensor,
) -> None:
    """Add the tokens of prompts to the mask, and the known tokens of answers to the counts. See `penalties`."""
    requests = expanded_idx_mapping
    tokens = all_token_ids[requests]
    places = torch.arange(tokens.shape[1], device=tokens.device)
    prompt, known = prompt_len[requests, None], prefill_len[requests, None]
    mask = prompt_bin_mask.view(torch.uint8)
    prompted = tokens_of(tokens, places < prompt, 8 * mask.shape[1])
    bits = torch.arange(8, dtype=torch.int32, device=tokens.device)
    mask[requests] |= (prompted.view(*mask[requests].shape, 8).int() << bits).sum(2).to(torch.uint8)
    answered = (places >= prompt) & (places < known)
    output_bin_counts[requests] += spread(tokens, answered, answered.int(), output_bin_counts.shape[1])
