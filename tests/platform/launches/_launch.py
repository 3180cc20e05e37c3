"""A random launch has a grid and arguments, which describe the requests of a random batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

ROOM, LENGTH, VOCABULARY = 9, 96, 150  # requests that have room, their longest length, and the width of the logits
POISON = -77
WORKER = "vllm.v1.worker."


@dataclass(frozen=True)
class Launch:
    """values: by the kernel's parameters, without `_ptr`. Strides follow from the tensors.

    compared: what to compare afterwards, from the values; without it, all tensors.
    """

    grid: tuple[int, ...]
    values: dict
    compared: Callable[[Mapping], dict] = field(default=lambda values: values)

    def run(self, kernel, parameters: tuple[str, ...]) -> dict[str, torch.Tensor]:
        kernel[self.grid](*(self._argument(name.removesuffix("_ptr")) for name in parameters))
        after = self.compared(self.values)
        return {name: value for name, value in after.items() if isinstance(value, torch.Tensor)}

    def _argument(self, name: str):
        if name in self.values:
            return self.values[name]
        name = name.replace("_row_stride", "_stride_0").replace("_col_stride", "_stride_1")
        tensor, _, axis = name.partition("_stride")
        value = self.values[tensor]
        return 0 if value is None else value.stride(int(axis.lstrip("_") or 0))


LAUNCHES: dict[str, Callable[[torch.Generator], Launch]] = {}


def of(kernel: str):
    def register(function):
        LAUNCHES[WORKER + kernel] = function
        return function

    return register


def ints(random: torch.Generator, low: int, high: int, *shape: int, dtype=torch.int32) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=random).to(dtype)


def floats(random: torch.Generator, *shape: int) -> torch.Tensor:
    """Of both signs."""
    return torch.randn(shape, generator=random) * 4


def starts(lengths: torch.Tensor, padding: int = 0) -> torch.Tensor:
    """Where rows of these lengths begin, and the end, repeated `padding` times."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()[[*range(len(lengths) + 1), *[-1] * padding]]


def addresses(tensors) -> torch.Tensor:
    """Implementations that cannot read memory by its address find the tensors in an attribute."""
    result = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)
    result.opset_tensors = list(tensors)
    return result


class Batch:
    """Some requests of ROOM, in random order: prefills, whole or in part, and decodes."""

    def __init__(self, random: torch.Generator) -> None:
        self.size = int(ints(random, 3, ROOM, 1))
        self.requests = torch.randperm(ROOM, generator=random)[: self.size]
        self.known = ints(random, 0, VOCABULARY, ROOM, LENGTH)
        self.prefill = ints(random, 5, LENGTH - 30, ROOM)
        self.prompt = self.prefill - ints(random, 0, 4, ROOM)
        self.computed = torch.where(ints(random, 0, 2, ROOM) > 0, self.prefill + ints(random, 0, 9, ROOM), 2)
        self.lengths = torch.where(
            self.computed[self.requests] < self.prefill[self.requests],
            torch.minimum(ints(random, 1, 40, self.size), (self.prefill - self.computed)[self.requests]),
            1,
        )
        self.starts = starts(self.lengths, padding=1)
        self.total = self.computed + 1
        self.num_tokens = int(self.lengths.sum())


class Rows:
    """Rows of logits: a few for each request of a batch, its first one and one for each draft."""

    def __init__(self, random: torch.Generator) -> None:
        self.batch = Batch(random)
        self.counts = ints(random, 1, 4, self.batch.size)
        self.starts = starts(self.counts)
        self.number = int(self.counts.sum())
        self.requests = self.batch.requests.repeat_interleave(self.counts)
        self.places = torch.cat([torch.arange(int(count)) for count in self.counts]).int()
        is_none = (self.places > 0) & (ints(random, 0, 4, self.number) == 0)
        self.inputs = ints(random, 0, 5, self.number).masked_fill(is_none, -1)  # a draft that fills a step up
        self.logits = floats(random, self.number, VOCABULARY)


def some(random: torch.Generator, values: torch.Tensor, neutral: float) -> torch.Tensor:
    """The values, a part of them replaced by a neutral one."""
    return torch.where(ints(random, 0, 2, *values.shape) > 0, values, neutral)
