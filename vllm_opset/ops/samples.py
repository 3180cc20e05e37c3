"""Building blocks for sample inputs: seeded random tensors of both signs, and strided views into poisoned storage."""

import zlib

import torch


def generator(name: str) -> torch.Generator:
    """A CPU generator seeded by a sample's name, so that a sample is the same in every process and on every device."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def normal(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, rng: torch.Generator, std: float = 1.0
) -> torch.Tensor:
    """A contiguous tensor of normal values."""
    return (torch.randn(shape, generator=rng) * std).to(device=device, dtype=dtype)


def row_view(tensor: torch.Tensor, padding: int = 8) -> torch.Tensor:
    """The same values as a view of wider rows, whose other columns are NaN: no kernel may read or write them."""
    wide = torch.full(
        (*tensor.shape[:-1], tensor.shape[-1] + padding), float("nan"), dtype=tensor.dtype, device=tensor.device
    )
    view = wide[..., : tensor.shape[-1]]
    view.copy_(tensor)
    return view
