"""The filters that requests can ask for, for the warm-ups of both samplers."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

ARGUMENTS = {"top_k": (2, torch.int32), "top_p": (0.5, torch.float32), "min_p": (0.25, torch.float32)}
ROWS = 2


def draw_by_each(
    draws: Mapping[torch.dtype, Callable], vocab_size: int, device: torch.device, processed: Iterable[str | None]
) -> None:
    """Call implementations of top_k_top_p_sample with each set of filters, for logits of zeros.

    A kernel may compile code of its own for each set. draws: by the dtype of the logits. processed: values of this
    argument.
    """
    logits = {dtype: torch.zeros(ROWS, vocab_size, dtype=dtype, device=device) for dtype in draws}
    ones = torch.ones(ROWS, dtype=torch.float32, device=device)  # vLLM changes the default while it loads a model
    for returned, given in itertools.product(processed, list(combinations(device))):
        for dtype, draw in draws.items():
            draw(logits[dtype], ones.long(), ones, **given, processed=returned)


def combinations(device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """Arguments for each set of filters. The largest comes first, because its kernels take longest to compile."""
    arguments = {
        name: torch.full((ROWS,), value, dtype=dtype, device=device) for name, (value, dtype) in ARGUMENTS.items()
    }
    for size in reversed(range(len(arguments) + 1)):
        for names in itertools.combinations(arguments, size):
            yield {name: arguments[name] for name in names}
