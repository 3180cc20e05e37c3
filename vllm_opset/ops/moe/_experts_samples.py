"""Sample inputs of fused_experts."""

from collections.abc import Iterator

import torch

from vllm_opset.ops.contract import Sample
from vllm_opset.ops.gemm._quantised import BLOCK, ROUNDED_FACTORS, TOKEN_BLOCK
from vllm_opset.ops.moe import _activations, _quantised
from vllm_opset.ops.moe._experts_inputs import experts_arguments
from vllm_opset.ops.moe.permute import choices, map_of_half
from vllm_opset.ops.schemes import FP4, FP8, INT8, MXFP4, PER_ROW, PER_TENSOR, GroupShape

# Choices that leave experts, rows or the whole step without work, and whether shared experts are added.
EDGES = {
    "zero tokens": (torch.empty(0, 2), False),
    "all tokens on one expert": (torch.full((35, 1), 2), False),
    "padded rows": (torch.tensor([[1, 0], [-1, -1], [3, 1], [-1, -1]]), True),
}


def samples(device: str, dtype: torch.dtype, atol: float) -> Iterator[Sample]:
    """atol: the absolute tolerance of the op in this dtype."""

    def sample(name: str, num_tokens: int, num_experts: int, top_k: int, *shape: int, mapped=False, **how) -> Sample:
        """mapped: whether half of the experts are here."""

        def make():
            ids = choices(name, num_tokens, num_experts, top_k, device)
            where = {"expert_map": map_of_half(num_experts, device)} if mapped else {}
            here = num_experts // 2 if mapped else num_experts
            return experts_arguments(name, ids, device, dtype, num_experts, *shape, here=here, **where, **how)

        return Sample(name, make)

    def given(name: str, ids: torch.Tensor, shared: bool) -> Sample:
        def make():
            tensor = ids.to(device, torch.int32)
            return experts_arguments(name, tensor, device, dtype, 4, 64, 32, bias=True, shared=shared)

        return Sample(name, make)

    def edges(prefix: str = "") -> list[Sample]:
        return [given(prefix + name, *how) for name, how in EDGES.items()]

    yield from edges()
    yield sample("one token", 1, 8, 2, 64, 48)
    yield sample("one expert", 5, 1, 1, 64, 48)
    yield sample("k = number of experts", 5, 4, 4, 64, 32, bias=True)
    yield sample("16 tokens", 16, 8, 2, 64, 48)
    yield sample("80 tokens, shared experts", 80, 8, 2, 64, 48, shared=True)
    yield sample("many experts", 5, 60, 4, 64, 32)
    yield sample("odd features", 7, 4, 2, 77, 33, bias=True)
    yield sample("gelu", 9, 4, 2, 64, 48, activation="gelu")
    yield sample("gelu_tanh, bias", 9, 4, 2, 64, 48, activation="gelu_tanh", bias=True)
    yield sample("gpt-oss", 9, 8, 4, 96, 64, activation="swigluoai", bias=True)
    yield sample("gpt-oss, one token", 1, 8, 4, 96, 64, activation="swigluoai", bias=True, swiglu_limit=0.5)
    yield sample("clamped silu", 9, 4, 2, 64, 48, swiglu_limit=0.5)
    yield sample(
        "clamped, in halves", 9, 4, 2, 64, 48,
        activation="swigluoai_uninterleave", swiglu_limit=1.0, swiglu_alpha=1.702, swiglu_beta=1.0,
    )  # fmt: skip
    yield sample("swiglustep", 9, 4, 2, 64, 48, activation="swiglustep", swiglu_limit=0.5)
    for activation in _activations.WITHOUT_GATE:
        yield sample(f"no gate: {activation}", 9, 4, 2, 64, 48, activation=activation)
    yield sample("weights on the input", 9, 4, 1, 64, 48, apply_router_weight_on_input=True)
    yield sample("half of the experts are here", 17, 8, 2, 64, 48, mapped=True)

    def scaled(made: Sample, group: GroupShape, x: GroupShape | None = None, to: torch.dtype = FP8) -> Sample:
        """x: the groups of activations that are quantised too."""
        scale = ROUNDED_FACTORS if x is None else _quantised.ANOTHER_STEP / atol
        return Sample(made.name, lambda: _quantised.rounded(*made.make(), group, x, to), scale)

    yield scaled(sample("fp8 weights per tensor", 5, 4, 2, 64, 48), PER_TENSOR)
    yield scaled(sample("fp8 weights by blocks, half of the experts", 5, 8, 2, 256, 96, mapped=True), BLOCK)
    yield scaled(sample("fp8 per tensor", 9, 4, 2, 64, 48), PER_TENSOR, PER_TENSOR)
    yield scaled(sample("fp8 per channel and token", 17, 4, 2, 96, 80, bias=True, shared=True), PER_ROW, PER_ROW)
    yield scaled(sample("fp8 by blocks, one token", 1, 8, 4, 256, 128), BLOCK, TOKEN_BLOCK)
    yield scaled(sample("fp8 by blocks", 80, 4, 2, 256, 128), BLOCK, TOKEN_BLOCK)
    yield scaled(sample("fp8 by incomplete blocks", 7, 4, 2, 200, 96, activation="gelu"), BLOCK, TOKEN_BLOCK)
    yield scaled(
        sample("fp8, weights on the input", 9, 4, 1, 64, 48, apply_router_weight_on_input=True), PER_ROW, PER_ROW
    )
    yield scaled(sample("int8 per channel and token", 9, 4, 2, 96, 80), PER_ROW, PER_ROW, INT8)
    yield scaled(
        sample("int8 per channel and token, half of the experts", 17, 8, 2, 64, 48, mapped=True), PER_ROW, PER_ROW, INT8
    )

    def mxfp4(made: Sample) -> Sample:
        return scaled(made, MXFP4.group, to=FP4)

    yield mxfp4(sample("mxfp4 weights", 7, 4, 2, 64, 32))
    yield mxfp4(sample("mxfp4, gpt-oss", 9, 8, 4, 96, 64, activation="swigluoai", bias=True))
    yield mxfp4(sample("mxfp4, gpt-oss, one token", 1, 8, 4, 288, 96, activation="swigluoai", bias=True))
    yield mxfp4(sample("mxfp4, half of the experts", 40, 4, 2, 160, 64, mapped=True, shared=True))

    def int4(made: Sample, group: int, zero_point: bool = False) -> Sample:
        return Sample(made.name, lambda: _quantised.in_int4(*made.make(), group, zero_point), ROUNDED_FACTORS)

    yield int4(sample("int4 weights", 7, 4, 2, 64, 32), 32)
    yield int4(sample("int4 by groups of 16", 5, 4, 2, 64, 32), 16)
    yield int4(sample("int4, zero points, one token, bias", 1, 8, 4, 256, 128, bias=True), 128, zero_point=True)
    yield int4(sample("int4, zero points, half of the experts", 40, 4, 2, 160, 64, mapped=True), 32, zero_point=True)
    yield int4(sample("int4 per row, shared experts", 80, 4, 2, 64, 96, shared=True), 128)

    for made in edges("fp8 per channel and token, "):
        yield scaled(made, PER_ROW, PER_ROW)
    for made in edges("int8 per channel and token, "):
        yield scaled(made, PER_ROW, PER_ROW, INT8)
    for made in edges("int4, zero points, "):
        yield int4(made, 32, zero_point=True)
    for made in edges("mxfp4, "):
        yield mxfp4(made)
