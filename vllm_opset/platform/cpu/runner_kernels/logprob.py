"""A kernel of `vllm.v1.worker.gpu.sample.logprob`."""

import numpy as np
import torch

from vllm_opset.platform.cpu.runner_kernels._registry import implements


@implements("gpu.sample.logprob._fill_logprob_token_ids_kernel", ignores="PADDED_COLS")
def fill_logprob_token_ids(
    out_token_ids: torch.Tensor,
    out_valid_mask: torch.Tensor,
    sampled_token_ids: torch.Tensor,
    topk_indices: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    num_per_req_token_ids: torch.Tensor,
    per_req_token_ids: torch.Tensor,
    NUM_TOPK: int,
) -> None:
    """The tokens whose log-probabilities each row gives: the sampled one, then the request's own or the likeliest."""
    tokens, valid = out_token_ids.numpy(), out_valid_mask.numpy()
    tokens[:, 0], valid[:, 0] = sampled_token_ids.numpy(), True
    own, likeliest = per_req_token_ids.numpy(), topk_indices.numpy()
    requests = expanded_idx_mapping.numpy()
    for row, (request, count) in enumerate(zip(requests, num_per_req_token_ids.numpy()[requests], strict=True)):
        asked = own[request, :count] if count else likeliest[row, :NUM_TOPK] if NUM_TOPK else np.empty(0, np.int32)
        tokens[row, 1 : 1 + len(asked)], valid[row, 1 : 1 + len(asked)] = asked, True
