"""The kernel of `vllm.v1.worker.gpu.sample.bad_words`."""

from itertools import pairwise

import torch

from vllm_opset.platform.cpu.runner_kernels._memory import recent_tokens
from vllm_opset.platform.cpu.runner_kernels._registry import implements


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
    for row, request in enumerate(expanded_idx_mapping.tolist()):
        count = int(num_bad_words[request])
        if not count:
            continue
        tokens = recent_tokens(row, request, all_token_ids, total_len, input_ids, expanded_local_pos)
        answer = tokens[int(prompt_len[request]) :]
        ends, words = bad_word_offsets[request, : count + 1].tolist(), bad_word_token_ids[request].tolist()
        for begin, end in pairwise(ends):
            *beginning, last = words[begin:end]
            if len(beginning) <= len(answer) and answer[len(answer) - len(beginning) :] == beginning:
                logits[row, last] = -torch.inf
