"""Random arguments of `linear` with weights and activations in fp8, on a GPU."""

import torch

from vllm_opset.ops.gemm._quantised import BLOCK, TOKEN_BLOCK, quantised_normal
from vllm_opset.ops.schemes import PER_ROW, PER_TENSOR, GroupShape

# What shares a scale: of the weight, and of the activations.
GROUPS = [(BLOCK, TOKEN_BLOCK), (PER_ROW, PER_ROW), (PER_TENSOR, PER_ROW)]


def fp8_arguments(
    tokens: int, outputs: int, columns: int, groups: tuple[GroupShape, GroupShape], rng: torch.Generator
) -> tuple:
    """Positional arguments, with a bias and a result in bf16."""
    x, x_scale = quantised_normal((tokens, columns), groups[1], "cuda", rng)
    weight, scale = quantised_normal((outputs, columns), groups[0], "cuda", rng, columns**-0.5)
    bias = torch.randn(outputs, generator=rng, device="cuda").bfloat16()
    return x, weight, bias, scale, x_scale, torch.bfloat16
