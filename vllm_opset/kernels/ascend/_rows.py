"""What the norms share: rows that lie side by side, and the one weight that their operators take."""

import torch


def rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x as [rows, hidden_size], contiguous: the operators are documented for 2 to 8 dimensions."""
    return x.reshape(-1, x.shape[-1]).to(dtype).contiguous()


def gamma(x: torch.Tensor, weight: torch.Tensor | None, weight_offset: float) -> torch.Tensor:
    """What the operators multiply by, for rows of its dtype: they want both in one.

    With an offset, as Gemma has it, it is fp32, where the sum is exact enough; so is the whole norm then.
    """
    if weight is None:
        return x.new_ones(x.shape[-1])
    return weight.float() + weight_offset if weight_offset else weight
