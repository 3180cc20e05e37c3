"""Building blocks for sample inputs: seeded random tensors of both signs, and strided views into poisoned storage."""

import math
import zlib

import torch

# Of a statistical test, for each of its settings. Triton's interpreter, which takes 10 ms a draw, lowers it.
DRAWS = 10_000


def generator(name: str, device: str = "cpu") -> torch.Generator:
    """A generator seeded by a sample's name.

    On the CPU, so that a sample is the same in every process and on every device; benchmarks, whose tensors are large,
    give their device.
    """
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))


def bench_tokens(device: str) -> tuple[int, ...]:
    """The numbers of tokens that ops on activations are timed with: of decode steps and of prompts."""
    return (1, 16, 256) if device == "cpu" else (1, 64, 256, 4096, 16384)


def normal(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, rng: torch.Generator, std: float = 1.0
) -> torch.Tensor:
    """A contiguous tensor of normal values."""
    return (torch.randn(shape, generator=rng, device=rng.device) * std).to(device=device, dtype=dtype)


def side_by_side(*tensors: torch.Tensor, padding: int = 8) -> tuple[torch.Tensor, ...]:
    """The same values as views of one tensor with wider rows, as the outputs of a fused projection are.

    After the last one come `padding` columns of NaN, which no kernel may read or write. Leading dimensions must agree.
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
