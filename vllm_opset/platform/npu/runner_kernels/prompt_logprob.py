"""The kernel of `vllm.v1.worker.gpu.sample.prompt_logprob`."""

import torch

from vllm_opset.platform.npu.runner_kernels._registry import implements
from vllm_opset.platform.npu.runner_kernels._rows import overwrite, ragged


@implements("gpu.sample.prompt_logprob._prompt_logprobs_token_ids_kernel")
def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids: torch.Tensor,
    query_start_loc: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    all_token_ids: torch.Tensor,
) -> None:
    """The token after each input of this step. Behind a request's last place for tokens, that is any token."""
    starts = query_start_loc[: len(idx_mapping) + 1]
    rows, places = ragged(starts, len(prompt_logprobs_token_ids))
    requests = idx_mapping[rows]
    following = (num_computed_tokens[requests] + places + 1).clamp_(max=all_token_ids.shape[1] - 1)
    overwrite(prompt_logprobs_token_ids, places < starts.diff()[rows], all_token_ids[requests, following])
