"""Building blocks for sample inputs: seeded random tensors of both signs, and strided views into poisoned storage."""

import math
import zlib

import torch

# The number of draws in a statistical test, for each of its settings. Tests lower it under Triton's interpreter, which
# takes 10 ms a draw.
DRAWS = 10_000


def generator(name: str, device: str = "cpu") -> torch.Generator:
    """A generator seeded by a sample's name.

    It is on the CPU by default, so a sample is the same in every process and on every device. Benchmarks need large
    tensors, so they pass their device.
    """
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))


def bench_tokens(device: str) -> tuple[int, ...]:
    """The numbers of tokens for benchmarks of ops on activations: those of decode steps, then those of prompts."""
    return (1, 16, 256) if device == "cpu" else (1, 64, 256, 4096, 16384)


def normal(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, rng: torch.Generator, std: float = 1.0
) -> torch.Tensor:
    """A contiguous tensor of normal values."""
    return (torch.randn(shape, generator=rng, device=rng.device) * std).to(device=device, dtype=dtype)


def side_by_side(*tensors: torch.Tensor, padding: int = 8) -> tuple[torch.Tensor, ...]:
    """The same values as views of one tensor with wider rows, like the outputs of a fused projection.

    `padding` columns of NaN follow the last view. No kernel may read or write them. Leading dimensions must agree.
    """
    widths = [tensor.shape[-1] for tensor in tensors]
    wide = tensors[0].new_full((*tensors[0].shape[:-1], sum(widths) + padding), math.nan)
    views = wide.split([*widths, padding], dim=-1)[: len(tensors)]
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    return views


def row_view(tensor: torch.Tensor, padding: int = 8) -> torch.Tensor:
    """The same values as a view of wider rows, whose other columns are NaN."""
    return side_by_side(tensor, padding=padding)[0]


def column_major(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the last two dimensions swapped in memory, so that a row is not dense."""
    return tensor.mT.contiguous().mT
