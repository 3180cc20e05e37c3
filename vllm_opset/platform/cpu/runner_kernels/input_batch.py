"""The kernels of `vllm.v1.worker.gpu.input_batch`: the inputs of a step, and the requests' state after it.

`idx_mapping` holds the row of the state for each request of a batch. Request i of the batch has the tokens from
`query_start_loc[i]` to `query_start_loc[i + 1]`, and the logits from `cu_num_logits[i]` to `cu_num_logits[i + 1]`.
"""

import numpy as np
import torch

from vllm_opset.platform.cpu.runner_kernels._memory import differences, ragged
from vllm_opset.platform.cpu.runner_kernels._registry import implements


@implements("gpu.input_batch._prepare_prefill_inputs_kernel")
def prepare_prefill_inputs(
    input_ids: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    num_lookahead: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    all_token_ids: torch.Tensor,
    prefill_lens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> None:
    """Copy the known tokens of requests that are not prefilled yet to the step's inputs.

    next_prefill_tokens: [num_lookahead, max_num_reqs], the known tokens after this step; 0 where there are none.
    """
    inputs, known, following = input_ids.numpy(), all_token_ids.numpy(), next_prefill_tokens.numpy()
    requests, starts = idx_mapping.numpy(), query_start_loc.numpy()
    lengths, computed = prefill_lens.numpy()[requests], num_computed_tokens.numpy()[requests]
    for i in (computed < lengths).nonzero()[0]:
        row, begin = known[requests[i]], computed[i]
        end = begin + starts[i + 1] - starts[i]
        inputs[starts[i] : starts[i + 1]] = row[begin:end]
        ahead = row[end : min(end + num_lookahead, lengths[i])]
        following[: len(ahead), requests[i]] = ahead
        following[len(ahead) : num_lookahead, requests[i]] = 0


@implements("gpu.input_batch._prepare_pos_seq_lens_kernel", ignores="max_num_reqs")
def prepare_pos_seq_lens(
    pos: torch.Tensor,
    seq_lens: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> None:
    """The position of each token, and the length of each request with this step's tokens; 0 where no request is."""
    num_reqs = len(idx_mapping)
    lengths = differences(query_start_loc[: num_reqs + 1])
    computed = num_computed_tokens.numpy()[idx_mapping.numpy()]
    all_lengths = seq_lens.numpy()
    np.add(computed, lengths, out=all_lengths[:num_reqs])
    all_lengths[num_reqs:] = 0
    rows, places = ragged(lengths)
    np.add(computed[rows], places, out=pos.numpy()[: len(rows)])


@implements("gpu.input_batch._combine_sampled_and_draft_tokens_kernel")
def combine_sampled_and_draft_tokens(
    input_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    draft_tokens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    logits_indices: torch.Tensor,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Add generated tokens to the step's inputs, and list the inputs whose logits are needed: the last ones.

    NUM_NEW_SAMPLED_TOKENS: tokens that a step samples beyond accepted drafts, 0 or 1.
    """
    requests, inputs = idx_mapping.numpy(), input_ids.numpy()
    ends, num_logits = query_start_loc.numpy()[1 : len(requests) + 1], differences(cu_num_logits)
    firsts = ends - num_logits
    rows, places = ragged(num_logits)
    logits_indices.numpy()[: len(rows)] = firsts[rows] + places

    lengths, known = seq_lens.numpy()[: len(requests)], prefill_len.numpy()[requests]
    if NUM_NEW_SAMPLED_TOKENS:
        generates = (lengths > known) & (lengths - num_logits >= known)
        inputs[firsts[generates]] = last_sampled_tokens.numpy()[requests[generates], 0]
    drafted, drafts = num_logits - NUM_NEW_SAMPLED_TOKENS, draft_tokens.numpy()
    for i in ((lengths > known) & (drafted > 0)).nonzero()[0]:
        inputs[ends[i] - drafted[i] : ends[i]] = drafts[requests[i], : drafted[i]]


@implements("gpu.input_batch._get_num_sampled_and_rejected_kernel")
def get_num_sampled_and_rejected(
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    prefill_len: torch.Tensor,
) -> None:
    """Set both numbers to 0 for requests that are not prefilled yet. For others, rejected logits are not sampled."""
    requests, sampled, rejected = idx_mapping.numpy(), num_sampled.numpy(), num_rejected.numpy()
    prefills = seq_lens.numpy()[: len(requests)] < prefill_len.numpy()[requests]
    sampled[prefills] = 0
    np.subtract(differences(cu_num_logits), sampled, out=rejected)
    rejected[prefills] = 0


@implements("gpu.input_batch._post_update_kernel", ignores="num_draft_tokens")
def post_update(
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    output_bin_counts: torch.Tensor | None,
    sampled_tokens: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
    draft_tokens: torch.Tensor | None = None,
    draft_tokens_out: torch.Tensor | None = None,
) -> None:
    """Add the sampled tokens to the state of their requests. A negative idx_mapping stands for no request."""
    batch = (idx_mapping.numpy() >= 0).nonzero()[0]
    requests, sampled = idx_mapping.numpy()[batch], num_sampled.numpy()[batch]
    if draft_tokens is not None:
        keep_drafts(idx_mapping, draft_tokens, draft_tokens_out)
    known, lengths = all_token_ids.numpy(), total_len.numpy()
    for place in range(sampled_tokens.shape[1]):
        has_one = sampled > place
        tokens, of = sampled_tokens.numpy()[batch[has_one], place], requests[has_one]
        known[of, lengths[of] + place] = tokens
        last_sampled_tokens.numpy()[of, 0] = tokens
        if output_bin_counts is not None:
            output_bin_counts.numpy()[of, tokens] += 1
    lengths[requests] += sampled
    computed = 0 if query_start_loc is None else differences(query_start_loc)[batch]
    num_computed_tokens.numpy()[requests] += computed - num_rejected.numpy()[batch]


def keep_drafts(idx_mapping: torch.Tensor, draft_tokens: torch.Tensor, draft_tokens_out: torch.Tensor) -> None:
    """Copy the drafts of a batch to the state of their requests."""
    batch = (idx_mapping.numpy() >= 0).nonzero()[0]
    draft_tokens_out.numpy()[idx_mapping.numpy()[batch]] = draft_tokens.numpy()[batch]


@implements("gpu.input_batch._post_update_num_computed_tokens_kernel")
def post_update_num_computed_tokens(
    idx_mapping: torch.Tensor, num_computed_tokens: torch.Tensor, query_start_loc: torch.Tensor
) -> None:
    """Count this step's tokens as computed."""
    lengths = differences(query_start_loc[: len(idx_mapping) + 1])
    num_computed_tokens.numpy()[idx_mapping.numpy()] += lengths


@implements("gpu.input_batch._expand_idx_mapping_kernel")
def expand_idx_mapping(
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    cu_num_logits: torch.Tensor,
) -> None:
    """The request of each row of the logits, and the row's place among those of its request."""
    rows, places = ragged(differences(cu_num_logits))
    expanded_idx_mapping.numpy()[: len(rows)] = idx_mapping.numpy()[rows]
    expanded_local_pos.numpy()[: len(rows)] = places
