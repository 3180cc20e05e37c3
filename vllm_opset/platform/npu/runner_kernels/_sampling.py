"""Masks over the vocabulary that several kernels share."""

import torch


def up_to(counts: torch.Tensor, width: int) -> torch.Tensor:
    """Which of `width` places come before each row's count: bool [rows, width]."""
    return torch.arange(width, device=counts.device) < counts[:, None]


def spread(tokens: torch.Tensor, wanted: torch.Tensor, values: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The sum of the values of each row's wanted tokens, at the places of these tokens: [rows, vocab_size].

    tokens, wanted, values: [rows, number]. Tokens that are not wanted may be anything.
    """
    room = values.new_zeros(len(tokens), vocab_size + 1)
    room.scatter_add_(1, tokens.long().masked_fill(~wanted, vocab_size), values.masked_fill(~wanted, 0))
    return room[:, :vocab_size]


def tokens_of(tokens: torch.Tensor, wanted: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Whether each row wants each token of the vocabulary: bool [rows, vocab_size]."""
    return spread(tokens, wanted, wanted.int(), vocab_size) > 0


def recent_tokens(
    back: torch.Tensor,
    requests: torch.Tensor,
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
    input_ids: torch.Tensor,
    expanded_local_pos: torch.Tensor,
) -> torch.Tensor:
    """The tokens that lie so many places before the one that each row draws, 1 for the last one: [rows, number].

    back: [rows, number], or [number] for all rows. input_ids: the input of each row of the logits. A request's first
    row has its last token, and the next ones have its drafts. Where there is no such token, it is any token.
    """
    rows, drafts = torch.arange(len(requests), device=requests.device)[:, None], expanded_local_pos[:, None]
    known = (total_len[requests, None] + drafts - back).clamp(0, all_token_ids.shape[1] - 1)
    drafted = input_ids[(rows - back + 1).clamp(0, len(rows) - 1)]
    return torch.where(back <= drafts, drafted, all_token_ids[requests[:, None], known])
