"""Random problems of linear: the projections of many models, shared out to tensor-parallel ranks, by four schemes."""

import math
import random

import torch

from vllm_opset.ops import _draws, _samples
from vllm_opset.ops.contract import Sample
from vllm_opset.ops.gemm._packed import random_weight
from vllm_opset.ops.gemm._quantised import BLOCK, ROUNDED_FACTORS, TOKEN_BLOCK, quantised_normal
from vllm_opset.ops.schemes import PER_ROW

# How weights are stored. `AS_IT_IS` has the name of the dtype in the names of the problems.
AS_IT_IS, FP8_BLOCKS, FP8_CHANNELS, INT4 = KINDS = ("as-it-is", "fp8-blocks", "fp8-channels", "int4")
INT4_GROUPS = (32, 64, 128, 128)  # most checkpoints have 128
FP8_GROUPS = {FP8_BLOCKS: (BLOCK, TOKEN_BLOCK), FP8_CHANNELS: (PER_ROW, PER_ROW)}

HEAD_SIZE = 128
QUERY_SIZES = (1, 1, 2)  # of all heads together, as multiples of the hidden size
KV_HEADS = (1, 2, 4, 8, 8)
INTERMEDIATE_SIZES = (2.5, 8 / 3, 3, 3.5, 4, 5.25)  # as multiples of the hidden size
RANKS = (1, 1, 1, 2, 4, 8)
OUTPUTS = 64  # the sizes of outputs are multiples of it
LEAST = 256  # of a rank's part of a layer
LAYERS = ("qkv", "o", "gate-up", "down")


def draw(device: str, dtype: torch.dtype, choices: random.Random) -> Sample:
    """A layer, and the tokens of a step. The first word of its name is how the weight is stored."""
    kind, layer, ranks = choices.choice(KINDS), choices.choice(LAYERS), choices.choice(RANKS)
    multiple = 64 if kind == AS_IT_IS else 128
    hidden_size = _draws.hidden_size(device, choices, multiple)
    whole = _whole(layer, hidden_size, choices)
    limits = _draws.limits(device)
    while math.prod(shape := _of_rank(layer, hidden_size, whole / ranks, multiple)) > limits.elements:
        ranks *= 2
    num_tokens = min(_draws.num_tokens(device, choices), limits.activations // max(shape))
    group, zero_point = choices.choice(INT4_GROUPS), choices.random() < 0.5
    name = f"{_draws.DTYPE_NAMES[dtype] if kind == AS_IT_IS else kind} T{num_tokens} {shape[0]} to {shape[1]} ({layer}"
    name += f", groups of {group}{', zero points' if zero_point else ''})" if kind == INT4 else ")"

    def make() -> tuple[tuple, dict]:
        rng = _samples.generator(name, device)
        x_shape, (in_features, out_features) = (num_tokens, shape[0]), shape
        if kind in FP8_GROUPS:
            group_of_weight, group_of_x = FP8_GROUPS[kind]
            std = in_features**-0.5
            weight, weight_scale = quantised_normal((out_features, in_features), group_of_weight, device, rng, std)
            x, x_scale = quantised_normal(x_shape, group_of_x, device, rng)
            return (x, weight), {"weight_scale": weight_scale, "x_scale": x_scale, "out_dtype": dtype}
        x = _samples.normal(x_shape, dtype, device, rng)
        if kind == INT4:
            weight, scale, zeros = random_weight(out_features, in_features, group, dtype, device, rng, zero_point)
            return (x, weight), {"weight_scale": scale, "out_dtype": dtype, "weight_zero_point": zeros}
        return (x, _samples.normal((out_features, in_features), dtype, device, rng, in_features**-0.5)), {}

    return Sample(name, make, 1.0 if kind == AS_IT_IS else ROUNDED_FACTORS)


def _whole(layer: str, hidden_size: int, choices: random.Random) -> float:
    """The size of the layer on one rank that is not the hidden size: of its outputs, or of its inputs."""
    heads = max(1, round(choices.choice(QUERY_SIZES) * hidden_size / HEAD_SIZE))
    kv_heads = min(heads, choices.choice(KV_HEADS))
    intermediate_size = choices.choice(INTERMEDIATE_SIZES) * hidden_size
    sizes = {
        "qkv": (heads + 2 * kv_heads) * HEAD_SIZE,
        "o": heads * HEAD_SIZE,
        "gate-up": 2 * intermediate_size,
        "down": intermediate_size,
    }
    return sizes[layer]


def _of_rank(layer: str, hidden_size: int, size: float, multiple: int) -> tuple[int, int]:
    """(in_features, out_features) of one rank. Ranks share the outputs of some layers, and the inputs of others."""
    if layer in ("qkv", "gate-up"):
        return hidden_size, _draws.to_multiple(size, OUTPUTS, LEAST)
    return _draws.to_multiple(size, multiple, LEAST), hidden_size
