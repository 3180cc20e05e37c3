"""Random launches of the kernels that vLLM's second model runner launches. A module for each kind registers its own."""

import torch

from launches import draft_inputs, drafts, inputs, logits, sampling, thinking  # noqa: F401
from launches._launch import LAUNCHES, Launch

TRIALS = 3


def launches(kernel: str) -> list[Launch]:
    """The same random launches in every process."""
    return [LAUNCHES[kernel](torch.Generator().manual_seed(seed)) for seed in range(TRIALS)]
