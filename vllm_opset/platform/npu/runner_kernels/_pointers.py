"""The tensors behind tensors of addresses."""

import torch


def pointed_at(pointers: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a tensor of addresses points at. The platform's `copy_to_device` keeps them in an attribute."""
    return pointers.opset_tensors
