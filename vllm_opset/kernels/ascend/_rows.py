"""Code that the norms share: contiguous rows, and the single weight that their operators take."""

import torch


def rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x as contiguous [rows, hidden_size], because the operators are documented for 2 to 8 dimensions."""
    return x.reshape(-1, x.shape[-1]).to(dtype).contiguous()


def gamma(x: torch.Tensor, weight: torch.Tensor | None, weight_offset: float) -> torch.Tensor:
    """The operator's weight, with the offset added. The rows must have its dtype, as the operators require.

    With an offset, as for Gemma, it is fp32, because this sum is exact enough. The whole norm is then computed in fp32.
    """
    if weight is None:
        return x.new_ones(x.shape[-1])
    return weight.float() + weight_offset if weight_offset else weight
