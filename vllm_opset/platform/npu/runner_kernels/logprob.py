"""A kernel of `vllm.v1.worker.gpu.sample.logprob`."""

import torch

from vllm_opset.platform.npu.runner_kernels._registry import implements
from vllm_opset.platform.npu.runner_kernels._rows import overwrite
from vllm_opset.platform.npu.runner_kernels._sampling import up_to


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
    out_token_ids[:, 0] = sampled_token_ids
    out_valid_mask[:, 0] = True
    counts, width = num_per_req_token_ids[expanded_idx_mapping], out_token_ids.shape[1] - 1
    asked = [(per_req_token_ids[expanded_idx_mapping], counts)]
    if NUM_TOPK:
        asked.append((topk_indices, NUM_TOPK * (counts == 0)))
    for tokens, number in asked:
        columns = min(width, tokens.shape[1])
        given = up_to(number, columns)
        overwrite(out_token_ids[:, 1 : 1 + columns], given, tokens[:, :columns].to(out_token_ids.dtype))
        out_valid_mask[:, 1 : 1 + columns] |= given
