"""The kernel of `vllm.v1.worker.gpu.sample.bad_words`."""

import torch

from vllm_opset.platform.npu.runner_kernels._registry import implements
from vllm_opset.platform.npu.runner_kernels._sampling import recent_tokens, tokens_of, up_to


@implements("gpu.sample.bad_words._bad_words_kernel")
def bad_words(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    bad_word_token_ids: torch.Tensor,
    bad_word_offsets: torch.Tensor,
    num_bad_words: torch.Tensor,
    all_token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    total_len: torch.Tensor,
    input_ids: torch.Tensor,
    expanded_local_pos: torch.Tensor,
) -> None:
    """Set the logits of tokens that would complete a bad word to -inf, in place.

    A bad word is a list of tokens: `bad_word_token_ids[request, offsets[i] : offsets[i + 1]]`. All but its last token
    must be the end of the answer so far. Drafts count as answered.
    """
    requests, most = expanded_idx_mapping, bad_word_offsets.shape[1] - 1
    words, offsets = bad_word_token_ids[requests], bad_word_offsets[requests]
    exists = up_to(num_bad_words[requests], most)
    places = torch.arange(words.shape[1], dtype=offsets.dtype, device=words.device).repeat(len(words), 1)
    begins, ends = offsets[:, :-1], offsets[:, 1:].masked_fill(~exists, words.shape[1])

    # Each token but the last one of its word is compared with the token that is as far before the drawn one.
    word = torch.searchsorted(ends, places, right=True).clamp_(max=most - 1)
    back = ends.gather(1, word) - 1 - places
    recent = recent_tokens(back, requests, all_token_ids, total_len, input_ids, expanded_local_pos)
    differs = (back > 0) & (words != recent)
    differing = torch.zeros_like(ends).scatter_add_(1, word, differs.to(ends.dtype))

    answered = (total_len - prompt_len)[requests] + expanded_local_pos
    completes = exists & (differing == 0) & (ends - begins - 1 <= answered[:, None])
    last = words.gather(1, (ends - 1).clamp_(min=0).long())
    logits.masked_fill_(tokens_of(last, completes, logits.shape[1]), -torch.inf)
