"""The kernels of `vllm.v1.worker.gpu.input_batch`: the inputs of a step, and the requests' state after it.

`idx_mapping` holds the row of the state for each request of a batch. Request i of the batch has the tokens from
`query_start_loc[i]` to `query_start_loc[i + 1]`, and the logits from `cu_num_logits[i]` to `cu_num_logits[i + 1]`.
"""

import torch

from vllm_opset.platform.npu.runner_kernels._registry import implements
from vllm_opset.platform.npu.runner_kernels._rows import overwrite, owners, ragged


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
    starts, last = query_start_loc[: len(idx_mapping) + 1], all_token_ids.shape[1] - 1
    prefill, computed, lengths = prefill_lens[idx_mapping], num_computed_tokens[idx_mapping], starts.diff()
    unfinished = computed < prefill
    rows, places = ragged(starts, len(input_ids))
    tokens = all_token_ids[idx_mapping[rows], (computed[rows] + places).clamp_(max=last)]
    overwrite(input_ids, places < (lengths * unfinished)[rows], tokens)

    following = computed + lengths + torch.arange(num_lookahead, device=input_ids.device)[:, None]
    tokens = all_token_ids[idx_mapping, following.clamp(max=last)].masked_fill_(following >= prefill, 0)
    next_prefill_tokens[:, idx_mapping] = torch.where(unfinished, tokens, next_prefill_tokens[:, idx_mapping])


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
    starts = query_start_loc[: num_reqs + 1]
    computed, lengths = num_computed_tokens[idx_mapping], starts.diff()
    torch.add(computed, lengths, out=seq_lens[:num_reqs])
    seq_lens[num_reqs:].zero_()
    rows, places = ragged(starts, len(pos))
    overwrite(pos, places < lengths[rows], computed[rows] + places)


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
    num_reqs, num_logits = len(idx_mapping), cu_num_logits.diff()
    rows, places = ragged(cu_num_logits, len(logits_indices))
    torch.add((query_start_loc[1 : num_reqs + 1] - num_logits)[rows], places, out=logits_indices)

    generated = torch.cat([last_sampled_tokens, draft_tokens], 1) if NUM_NEW_SAMPLED_TOKENS else draft_tokens
    tokens = generated[idx_mapping[rows], places].to(input_ids.dtype)
    lengths, known = seq_lens[:num_reqs], prefill_len[idx_mapping]
    replaced = (lengths > known)[rows]
    if NUM_NEW_SAMPLED_TOKENS:  # The first of a request's inputs may be the last token of its prompt.
        replaced &= (places > 0) | (lengths - num_logits >= known)[rows]
    input_ids[logits_indices] = torch.where(replaced, tokens, input_ids[logits_indices])


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
    prefills = seq_lens[: len(idx_mapping)] < prefill_len[idx_mapping]
    num_sampled.masked_fill_(prefills, 0)
    torch.sub(cu_num_logits.diff(), num_sampled, out=num_rejected).masked_fill_(prefills, 0)


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
    """Add the sampled tokens to the state of their requests. A negative idx_mapping stands for no request.

    All rows of the state are written, each once. Rows of no request keep their values.
    """
    batch = owners(idx_mapping, len(total_len))
    absent, batch = batch < 0, batch.clamp(min=0)
    if draft_tokens is not None:
        overwrite(draft_tokens_out, ~absent[:, None], draft_tokens[batch])
    sampled = num_sampled[batch].masked_fill_(absent, 0)
    has_one, counts = sampled[:, None] > 0, sampled[:, None]

    # Places behind the last sampled token repeat it, so that a row's writes agree in whatever order they happen.
    order = torch.arange(sampled_tokens.shape[1], device=counts.device)
    places = torch.minimum(order, counts - 1).clamp_(min=0)
    tokens = sampled_tokens[batch].gather(1, places).masked_fill_(~has_one, 0)
    rows = torch.arange(len(total_len), device=counts.device)[:, None]
    columns = (total_len[:, None] + places).clamp_(max=all_token_ids.shape[1] - 1)
    known = all_token_ids[rows, columns]
    all_token_ids[rows, columns] = torch.where(has_one, tokens.to(known.dtype), known)
    overwrite(last_sampled_tokens, has_one, tokens[:, -1:])
    if output_bin_counts is not None:
        output_bin_counts.index_put_((rows, tokens), (order < counts).to(output_bin_counts.dtype), accumulate=True)

    total_len += sampled
    rejected = num_rejected[batch]
    computed = -rejected if query_start_loc is None else query_start_loc.diff()[batch] - rejected
    num_computed_tokens += computed.masked_fill_(absent, 0)


@implements("gpu.input_batch._post_update_num_computed_tokens_kernel")
def post_update_num_computed_tokens(
    idx_mapping: torch.Tensor, num_computed_tokens: torch.Tensor, query_start_loc: torch.Tensor
) -> None:
    """Count this step's tokens as computed."""
    num_computed_tokens[idx_mapping] += query_start_loc[: len(idx_mapping) + 1].diff()


@implements("gpu.input_batch._expand_idx_mapping_kernel")
def expand_idx_mapping(
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    cu_num_logits: torch.Tensor,
) -> None:
    """The request of each row of the logits, and the row's place among those of its request."""
    rows, places = ragged(cu_num_logits, len(expanded_idx_mapping))
    inside = places < cu_num_logits.diff()[rows]
    overwrite(expanded_idx_mapping, inside, idx_mapping[rows])
    overwrite(expanded_local_pos, inside, places)
