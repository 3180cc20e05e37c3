"""apply_penalties that touches only the logits of the tokens that occur."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel


@kernel(ops.apply_penalties, name="cpu")
def apply_penalties(
    logits: torch.Tensor,
    prompt_token_ids: torch.Tensor,
    output_token_ids: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    vocab_size = logits.shape[1]
    ids = torch.cat([prompt_token_ids, output_token_ids], dim=1)
    rows, places = (ids < vocab_size).nonzero(as_tuple=True)
    tokens = ids[rows, places]
    count = _occurrences(output_token_ids, rows, tokens, vocab_size)
    value = logits[rows, tokens]
    factor = repetition[rows]
    value = torch.where(value > 0, value / factor, value * factor)
    # A token that occurs twice is written twice, with the same value.
    logits[rows, tokens] = value - frequency[rows] * count - presence[rows] * (count > 0)


def _occurrences(token_ids: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """How often each of `tokens` occurs in its row of token_ids. Initialises only the counters that are used."""
    counters = torch.empty((len(token_ids), vocab_size + 1))
    counters[rows, tokens] = 0.0
    counters.scatter_add_(1, token_ids, torch.ones((1, 1)).expand(token_ids.shape))
    return counters[rows, tokens]
