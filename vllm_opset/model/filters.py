"""The filters that requests can ask for, for the warm-ups of both samplers."""

import itertools
from collections.abc import Iterator

import torch

ARGUMENTS = {"top_k": (2, torch.int32), "top_p": (0.5, torch.float32), "min_p": (0.25, torch.float32)}


def combinations(num_rows: int, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """Arguments of top_k_top_p_sample for each set of filters. A kernel may compile code of its own for each."""
    arguments = {
        name: torch.full((num_rows,), value, dtype=dtype, device=device) for name, (value, dtype) in ARGUMENTS.items()
    }
    for size in range(len(arguments) + 1):
        for names in itertools.combinations(arguments, size):
            yield {name: arguments[name] for name in names}
