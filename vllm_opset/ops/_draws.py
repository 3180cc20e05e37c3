"""Building blocks for random problems: sizes that models have, and sizes between them."""

import math
import random
from dataclasses import dataclass

import torch

# The hidden sizes of models from 0.5 to 700 billion parameters, and the share of problems with another one.
HIDDEN_SIZES = (1024, 1536, 2048, 2304, 2560, 2880, 3072, 3584, 4096, 5120, 6144, 7168, 8192)
OTHER_SIZES = 0.25
FEW_TOKENS = 64  # half of the problems have at most so many, as in decode steps
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Limits:
    """The most tokens, and the most elements of weights and of activations, that a device computes in a moment."""

    tokens: int
    elements: int
    activations: int
    hidden_sizes: tuple[int, ...]


LIMITS = {
    "cuda": Limits(16384, 2**30, 2**29, HIDDEN_SIZES),  # weights of 2 GiB in bf16; checks in fp64
    "cpu": Limits(256, 2**22, 2**22, (256, 384, 512, 768, 1024)),
}


def limits(device: str) -> Limits:
    return LIMITS["cpu" if device == "cpu" else "cuda"]


def log_uniform(choices: random.Random, least: int, most: int) -> int:
    """A number from `least` to `most`; half of them are below the geometric mean of the two."""
    return round(math.exp(choices.uniform(math.log(least), math.log(max(least, most)))))


def num_tokens(device: str, choices: random.Random) -> int:
    most = limits(device).tokens
    return log_uniform(choices, 1, min(FEW_TOKENS, most) if choices.random() < 0.5 else most)


def hidden_size(device: str, choices: random.Random, multiple: int) -> int:
    """A hidden size of a model that is such a multiple, or in OTHER_SIZES of the problems an odd multiple."""
    sizes = [size for size in limits(device).hidden_sizes if size % multiple == 0]
    if choices.random() < OTHER_SIZES:
        return multiple * (2 * choices.randrange(min(sizes) // multiple // 2, max(sizes) // multiple // 2) + 1)
    return choices.choice(sizes)


def to_multiple(size: float, multiple: int, least: int) -> int:
    """The multiple nearest to a size, and not below `least`, which is a multiple too."""
    return max(least, multiple * round(size / multiple))
