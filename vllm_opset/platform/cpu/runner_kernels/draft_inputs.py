"""Kernels that prepare the inputs of a model that drafts.

They are those of `vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator` for a model of its own, and those of
`….target_dependent_ar.speculator` for layers that read the target's hidden states.

The target's step has the tokens of request i from `query_start_loc[i]` to `query_start_loc[i + 1]`. The last
`num_rejected[i]` of them are drafts that the target rejected.
"""

import numpy as np
import torch

from vllm_opset.platform.cpu.runner_kernels._memory import differences, ragged
from vllm_opset.platform.cpu.runner_kernels._registry import implements_for_drafts as implements

OF_A_MODEL = "gpu.spec_decode.standalone_ar.speculator"
OF_LAYERS = "gpu.spec_decode.target_dependent_ar.speculator"


def fill(buffer: torch.Tensor, values: np.ndarray, rest: int, room: int) -> None:
    """Write the values of a batch to a buffer that has room for all requests, and `rest` behind them."""
    places = buffer.numpy()[:room]
    places[: len(values)] = values
    places[len(values) :] = rest


@implements(f"{OF_A_MODEL}._prepare_prefill_inputs_kernel")
def prepare_expanded_inputs(
    target_input_ids: torch.Tensor,
    target_positions: torch.Tensor,
    last_sampled: torch.Tensor,
    idx_mapping: torch.Tensor,
    out_input_ids: torch.Tensor,
    out_positions: torch.Tensor,
    last_token_indices: torch.Tensor,
    out_query_start_loc: torch.Tensor,
    out_seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_rejected: torch.Tensor,
    max_num_reqs: int,
    max_model_len: int,
) -> None:
    """The target's tokens with one more for each request: the last sampled one, behind the tokens that are accepted.

    Behind that one, rejected tokens become 0. Their keys and values are overwritten in a later step.
    """
    num_reqs = len(idx_mapping)
    starts = query_start_loc.numpy()[: num_reqs + 1] + np.arange(num_reqs + 1)
    lengths = starts[1:] - starts[:-1]
    rows, places = ragged(lengths)
    num_valid = lengths - 1 - num_rejected.numpy()[:num_reqs]
    firsts = query_start_loc.numpy()[:num_reqs]
    inputs = out_input_ids.numpy()[: len(rows)]
    is_valid = places < num_valid[rows]
    inputs[:] = 0
    inputs[is_valid] = target_input_ids.numpy()[(firsts[rows] + places)[is_valid]]
    last = starts[:-1] + num_valid
    inputs[last] = last_sampled.numpy().reshape(-1)[idx_mapping.numpy()]
    positions = target_positions.numpy()[firsts][rows] + places
    np.minimum(positions, max_model_len - 1, out=out_positions.numpy()[: len(rows)])
    fill(last_token_indices, last, 0, max_num_reqs)
    fill(out_query_start_loc, starts, starts[-1], max_num_reqs + 1)
    fill(out_seq_lens, np.minimum(seq_lens.numpy()[:num_reqs] + 1, max_model_len), 0, max_num_reqs)


@implements(f"{OF_LAYERS}._prepare_prefill_inputs_kernel")
def prepare_shifted_inputs(
    last_token_indices: torch.Tensor,
    draft_current_step: torch.Tensor,
    draft_input_ids: torch.Tensor,
    draft_positions: torch.Tensor,
    draft_query_start_loc: torch.Tensor,
    draft_seq_lens: torch.Tensor,
    target_input_ids: torch.Tensor,
    target_positions: torch.Tensor,
    idx_mapping: torch.Tensor,
    last_sampled: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_num_reqs: int,
) -> None:
    """The target's accepted tokens, each one place further in front, and the next token of each request behind them.

    The next token is the last sampled one, or the next one of a prompt that is not computed yet. The places of rejected
    tokens keep what they have.
    """
    num_reqs, requests = len(idx_mapping), idx_mapping.numpy()
    starts = query_start_loc.numpy()[: num_reqs + 1]
    lengths = differences(query_start_loc[: num_reqs + 1]) - num_rejected.numpy()[:num_reqs]
    rows, places = ragged(lengths)
    tokens = starts[rows] + places
    inputs = draft_input_ids.numpy()
    inputs[tokens] = target_input_ids.numpy()[np.minimum(tokens + 1, len(target_input_ids) - 1)]
    draft_positions.numpy()[tokens] = target_positions.numpy()[tokens]
    last = starts[:-1] + lengths - 1
    sampled, known = last_sampled.numpy().reshape(-1)[requests], next_prefill_tokens.numpy().reshape(-1)[requests]
    inputs[last] = np.where(num_sampled.numpy()[:num_reqs] > 0, sampled, known)
    fill(last_token_indices, last, 0, max_num_reqs)
    fill(draft_query_start_loc, starts, starts[-1], max_num_reqs + 1)
    fill(draft_seq_lens, seq_lens.numpy()[:num_reqs], 0, max_num_reqs)
    draft_current_step.fill_(0)


@implements(f"{OF_LAYERS}._prepare_decode_inputs_kernel")
def prepare_decode_inputs(
    draft_tokens: torch.Tensor,
    target_seq_lens: torch.Tensor,
    num_rejected: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    sample_src_positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_model_len: int,
    max_num_reqs: int,
    ADVANCE_DRAFT_POSITIONS: bool,
) -> None:
    """The inputs for the second draft of each request: its first draft alone, one position on."""
    num_reqs = len(draft_tokens)
    input_ids[:num_reqs] = draft_tokens
    sample_src_positions[:num_reqs] += 1
    fill(seq_lens, (target_seq_lens[:num_reqs] - num_rejected[:num_reqs]).numpy(), 0, max_num_reqs)
    if ADVANCE_DRAFT_POSITIONS:
        advance(positions[:num_reqs], seq_lens[:num_reqs], max_model_len)
    fill(query_start_loc, np.arange(num_reqs + 1), num_reqs, max_num_reqs + 1)


@implements(f"{OF_LAYERS}._update_draft_inputs_kernel", ignores="hidden_size")
def update_draft_inputs(
    output_draft_tokens: torch.Tensor,
    next_input_hidden_states: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    sample_src_positions: torch.Tensor,
    seq_lens: torch.Tensor,
    draft_tokens: torch.Tensor,
    current_draft_step: torch.Tensor,
    hidden_states: torch.Tensor,
    max_model_len: int,
    num_speculative_steps: int,
    ADVANCE_DRAFT_POSITIONS: bool,
) -> None:
    """Keep a step's drafts, and make them the inputs of the next step, if there is one."""
    num_reqs, step = len(draft_tokens), int(current_draft_step)
    output_draft_tokens[:num_reqs, step] = draft_tokens
    if step >= num_speculative_steps - 1:
        return
    sample_src_positions[:num_reqs] += 1
    input_ids[:num_reqs] = draft_tokens
    next_input_hidden_states[:num_reqs] = hidden_states[:num_reqs]
    if ADVANCE_DRAFT_POSITIONS:
        advance(positions[:num_reqs], seq_lens[:num_reqs], max_model_len)


def advance(positions: torch.Tensor, seq_lens: torch.Tensor, max_model_len: int) -> None:
    """Move on by one token, at most to the last one that a request can have."""
    positions.add_(1).clamp_(max=max_model_len - 1)
    seq_lens.add_(1).clamp_(max=max_model_len)
