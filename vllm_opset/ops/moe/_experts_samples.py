"""Sample inputs of fused_experts."""

from collections.abc import Iterator

import torch

from vllm_opset.ops.contract import Sample
from vllm_opset.ops.gemm._quantised import BLOCK, ROUNDED_FACTORS, TOKEN_BLOCK
from vllm_opset.ops.moe import _activations, _quantised
from vllm_opset.ops.moe._experts_inputs import experts_arguments
from vllm_opset.ops.moe.permute import choices, map_of_half
from vllm_opset.ops.schemes import FP4, FP8, INT8, MXFP4, PER_ROW, PER_TENSOR


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

    def given(name: str, ids: list[list[int]], num_experts: int, *shape: int, **how) -> Sample:
        def make():
            tensor = torch.tensor(ids, dtype=torch.int32, device=device)
            return experts_arguments(name, tensor, device, dtype, num_experts, *shape, **how)

        return Sample(name, make)

    yield sample("zero tokens", 0, 4, 2, 32, 16)
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
    yield given("all tokens on one expert", [[2]] * 35, 4, 64, 48, bias=True)
    yield given("padded rows", [[1, 0], [-1, -1], [3, 1], [-1, -1]], 4, 64, 48, bias=True, shared=True)

    def scaled(name: str, num_tokens: int, num_experts: int, top_k: int, *shape: int, group, x=None, to=FP8, **how):
        made = sample(name, num_tokens, num_experts, top_k, *shape, **how).make
        scale = ROUNDED_FACTORS if x is None else _quantised.ANOTHER_STEP / atol
        return Sample(name, lambda: _quantised.rounded(*made(), group, x, to), scale)

    yield scaled("fp8 weights per tensor", 5, 4, 2, 64, 48, group=PER_TENSOR)
    yield scaled("fp8 weights by blocks, half of the experts", 5, 8, 2, 256, 96, group=BLOCK, mapped=True)
    yield scaled("fp8 per tensor", 9, 4, 2, 64, 48, group=PER_TENSOR, x=PER_TENSOR)
    yield scaled("fp8 per channel and token", 17, 4, 2, 96, 80, group=PER_ROW, x=PER_ROW, bias=True, shared=True)
    yield scaled("fp8 by blocks, one token", 1, 8, 4, 256, 128, group=BLOCK, x=TOKEN_BLOCK)
    yield scaled("fp8 by blocks", 80, 4, 2, 256, 128, group=BLOCK, x=TOKEN_BLOCK)
    yield scaled("fp8 by incomplete blocks", 7, 4, 2, 200, 96, group=BLOCK, x=TOKEN_BLOCK, activation="gelu")
    yield scaled(
        "fp8, weights on the input", 9, 4, 1, 64, 48, group=PER_ROW, x=PER_ROW, apply_router_weight_on_input=True
    )
    yield scaled("int8 per channel and token", 9, 4, 2, 96, 80, group=PER_ROW, x=PER_ROW, to=INT8)
    mxfp4 = {"group": MXFP4.group, "to": FP4}
    yield scaled("mxfp4 weights", 7, 4, 2, 64, 32, **mxfp4)
    yield scaled("mxfp4, gpt-oss", 9, 8, 4, 96, 64, **mxfp4, activation="swigluoai", bias=True)
    yield scaled("mxfp4, gpt-oss, one token", 1, 8, 4, 288, 96, **mxfp4, activation="swigluoai", bias=True)

    def int4(name: str, *shape: int, group: int, zero_point: bool = False, **how) -> Sample:
        made = sample(name, *shape, **how).make
        return Sample(name, lambda: _quantised.in_int4(*made(), group, zero_point), ROUNDED_FACTORS)

    yield int4("int4 weights", 7, 4, 2, 64, 32, group=32)
    yield int4("int4, zero points, one token, bias", 1, 8, 4, 256, 128, group=128, zero_point=True, bias=True)
    yield int4("int4, zero points, half of the experts", 40, 4, 2, 160, 64, group=32, zero_point=True, mapped=True)
    yield int4("int4 per row, shared experts", 80, 4, 2, 64, 96, group=128, shared=True)
    yield scaled("mxfp4, half of the experts", 40, 4, 2, 160, 64, **mxfp4, mapped=True, shared=True)
