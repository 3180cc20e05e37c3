"""Checks of strides, for kernels that read memory as if a tensor, or each of its rows, were dense."""

import torch


def check_contiguous(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError, with its name, for a tensor that is not contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, not {list(tensor.shape)} with strides {list(tensor.stride())}"
            )


def check_rows(name: str, matrix: torch.Tensor) -> None:
    """Raise ValueError for a matrix whose rows are not dense. name: of the matrix, for the message."""
    if matrix.stride(-1) != 1 and matrix.shape[-1] > 1 and matrix.numel():
        raise ValueError(f"{name} must have dense rows, not {list(matrix.shape)} with strides {list(matrix.stride())}")
