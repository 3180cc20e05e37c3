"""Random problems of fused_experts: the layers of many mixtures of experts, by five schemes."""

import random

import torch

from vllm_opset.ops import _draws
from vllm_opset.ops.contract import Sample
from vllm_opset.ops.gemm._quantised import BLOCK, TOKEN_BLOCK
from vllm_opset.ops.moe import _quantised
from vllm_opset.ops.moe._experts_inputs import experts_arguments
from vllm_opset.ops.moe.permute import choices as chosen_experts
from vllm_opset.ops.schemes import FP4, FP8, MXFP4, PER_ROW

# How weights are stored. `AS_THEY_ARE` has the name of the dtype in the names of the problems.
AS_THEY_ARE, FP8_BLOCKS, FP8_CHANNELS, INT4, MXFP4_KIND = KINDS = (
    "as-they-are", "fp8-blocks", "fp8-channels", "int4", "mxfp4",
)  # fmt: skip
INT4_GROUPS = (32, 64, 128, 128)  # most checkpoints have 128
FP8_GROUPS = {FP8_BLOCKS: (BLOCK, TOKEN_BLOCK), FP8_CHANNELS: (PER_ROW, PER_ROW)}

EXPERTS = (8, 16, 32, 60, 64, 96, 128, 128, 160, 256)
TOP_K = (1, 2, 4, 6, 8, 8)
CHOSEN = 4  # at most one in so many experts is chosen
# Intermediate sizes, those of tensor-parallel ranks included.
WIDTHS = (
    128, 192, 256, 320, 384, 512, 640, 704, 768, 896, 1024, 1408, 1536, 1792, 2048, 2560, 2880, 3072, 3584, 4096, 5120,
    6400, 7168, 8192, 14336,
)  # fmt: skip
# Results are of the order of 0.1, so the tolerance of order 1 is wide enough for weights that are rounded to the dtype.
# Quantised activations may become the next value in fp8, which moves results by up to this many tolerances.
FP8_STEPS = 3.0
# The biases and the activation of gpt-oss make results of order 1. The roundings that the contract allows move one of
# four million by more than the tolerance of order 1, and one of 50 million by 1.3 times that.
MXFP4_RESULTS = 1.5
MATRICES = 3  # of a gated expert, each [hidden size, width]


def draw(device: str, dtype: torch.dtype, choices: random.Random) -> Sample:
    """A layer, and the tokens of a step. The first word of its name is how the weights are stored."""
    kind = choices.choice(KINDS)
    multiple = 64 if kind == AS_THEY_ARE else 128
    hidden_size, most = _draws.hidden_size(device, choices, multiple), _draws.limits(device).elements
    widths = [width for width in WIDTHS if width % multiple == 0]
    per_width = MATRICES * hidden_size
    num_experts = choices.choice([number for number in EXPERTS if number * per_width * widths[0] <= most])
    width = choices.choice([width for width in widths if num_experts * per_width * width <= most])
    top_k = choices.choice([number for number in TOP_K if CHOSEN * number <= num_experts])
    num_tokens = _draws.num_tokens(device, choices)
    group, zero_point = choices.choice(INT4_GROUPS), choices.random() < 0.5
    name = f"{_draws.DTYPE_NAMES[dtype] if kind == AS_THEY_ARE else kind} T{num_tokens} E{num_experts} k{top_k} "
    name += f"H{hidden_size} I{width}"
    if kind == INT4:
        name += f" (groups of {group}{', zero points' if zero_point else ''})"

    def make() -> tuple[tuple, dict]:
        ids = chosen_experts(name, num_tokens, num_experts, top_k, device, on=device)
        # gpt-oss is the model in MXFP4.
        how = {"activation": "swigluoai", "bias": True} if kind == MXFP4_KIND else {}
        arguments = experts_arguments(name, ids, device, dtype, num_experts, hidden_size, width, on=device, **how)
        if kind in FP8_GROUPS:
            return _quantised.rounded(*arguments, *FP8_GROUPS[kind], FP8)
        if kind == INT4:
            return _quantised.in_int4(*arguments, group, zero_point, on=device)
        return _quantised.rounded(*arguments, MXFP4.group, None, FP4) if kind == MXFP4_KIND else arguments

    scale = FP8_STEPS if kind in FP8_GROUPS else MXFP4_RESULTS if kind == MXFP4_KIND else 1.0
    return Sample(name, make, scale)
