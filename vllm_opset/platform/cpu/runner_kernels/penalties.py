"""The kernels of `vllm.v1.worker.gpu.sample.penalties`."""

import numpy as np
import torch

from vllm_opset.platform.cpu.runner_kernels._memory import bits
from vllm_opset.platform.cpu.runner_kernels._registry import implements

WORD = 32  # bits of a word of the mask of tokens in prompts


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
    penalty = torch.stack([repetition_penalty[requests], frequency_penalty[requests], presence_penalty[requests]])
    rows = (penalty != torch.tensor([[1.0], [0.0], [0.0]])).any(0).nonzero().squeeze(1)
    repetition, frequency, presence = penalty[:, rows, None]
    requests = requests[rows]
    counts = output_bin_counts[requests]
    for i, row in enumerate(rows.tolist()):
        drafts = token_ids[row - int(expanded_local_pos[row]) + 1 : row + 1]
        drafts = drafts[drafts >= 0].long()  # vLLM fills the first step of a request up with drafts of −1
        counts[i].scatter_add_(0, drafts, torch.ones_like(drafts, dtype=counts.dtype))
    answered = counts > 0
    prompted = torch.from_numpy(bits(prompt_bin_mask[requests].numpy(), vocab_size)).bool()
    scale = torch.where(prompted | answered, repetition, 1.0)
    scores = logits[rows].float()
    scores *= torch.where(scores > 0, 1.0 / scale, scale)
    scores -= frequency * counts
    scores -= presence * answered
    logits[rows] = scores.to(logits.dtype)


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
    mask, counts = prompt_bin_mask.numpy(), output_bin_counts.numpy()
    for request in expanded_idx_mapping.tolist():
        prompt, known = int(prompt_len[request]), int(prefill_len[request])
        tokens = all_token_ids[request].numpy()
        has = np.zeros(mask.shape[1] * WORD, dtype=bool)
        has[tokens[:prompt]] = True
        mask[request] |= np.packbits(has, bitorder="little").view(np.int32)
        counts[request] += np.bincount(tokens[prompt:known], minlength=counts.shape[1]).astype(counts.dtype)
