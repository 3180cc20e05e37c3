"""The kernel of `vllm.v1.worker.gpu.sample.prompt_logprob`."""

import numpy as np
import torch

from vllm_opset.platform.cpu.runner_kernels._memory import differences, ragged
from vllm_opset.platform.cpu.runner_kernels._registry import implements


@implements("gpu.sample.prompt_logprob._prompt_logprobs_token_ids_kernel")
def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids: torch.Tensor,
    query_start_loc: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    all_token_ids: torch.Tensor,
) -> None:
    """The token after each input of this step. Behind a request's last place for tokens, that is any token."""
    requests, known = idx_mapping.numpy(), all_token_ids.numpy()
    rows, places = ragged(differences(query_start_loc[: len(requests) + 1]))
    following = num_computed_tokens.numpy()[requests][rows] + places + 1
    tokens = known[requests[rows], np.minimum(following, known.shape[1] - 1)]
    prompt_logprobs_token_ids.numpy()[: len(rows)] = tokens
