"""fused_experts as the composition of other ops: permute, grouped_gemm, an activation, and combine.

If the scheme quantises activations, quantise comes before each product. After SiLU, silu_and_mul_quant does both.

- `decode`: few choices for each expert, in blocks of the fewest rows that tensor cores take.
- `prefill`: more choices, in larger blocks.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import (
    _fp4_sm90,
    _launch,
    _mxfp4_grouped_gemm,
    _packed_experts_sm90,
    _scaled_grouped_gemm,
    _supports,
)
from vllm_opset.kernels.triton._tiles import Order
from vllm_opset.kernels.triton.combine import combine
from vllm_opset.kernels.triton.gelu import gelu
from vllm_opset.kernels.triton.gelu_and_mul import gelu_and_mul
from vllm_opset.kernels.triton.gelu_tanh import gelu_tanh
from vllm_opset.kernels.triton.grouped_gemm import is_packed, packed_supports, write_products
from vllm_opset.kernels.triton.permute import permute
from vllm_opset.kernels.triton.quantise import quantise
from vllm_opset.kernels.triton.quantise import supports as can_quantise
from vllm_opset.kernels.triton.relu2 import relu2
from vllm_opset.kernels.triton.silu_and_mul import silu_and_mul
from vllm_opset.kernels.triton.silu_and_mul_quant import silu_and_mul_quant
from vllm_opset.kernels.triton.silu_and_mul_with_clamp import silu_and_mul_with_clamp
from vllm_opset.kernels.triton.swigluoai_and_mul import swigluoai_and_mul
from vllm_opset.kernels.triton.swiglustep_and_mul import swiglustep_and_mul
from vllm_opset.ops.moe import _activations
from vllm_opset.ops.moe.fused_experts import FusedExpertsProblem, check_arguments
from vllm_opset.ops.quantisation.quantise import QuantiseProblem
from vllm_opset.ops.schemes import PACKED, PER_TENSOR, is_mxfp4
from vllm_opset.variants import Variant, Variants

ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    run.__name__: run
    for run in (
        gelu, gelu_and_mul, gelu_tanh, relu2, silu_and_mul, silu_and_mul_with_clamp, swigluoai_and_mul,
        swiglustep_and_mul,
    )
}  # fmt: skip


class Call(NamedTuple):
    """mean: the choices of an expert that is here, rounded up. launch: the name of the launches for its weights."""

    mean: int
    launch: str
    device: torch.device


def describe(
    hidden_states, w1, w2, topk_weights, topk_ids, activation="silu", w1_bias=None, w2_bias=None, expert_map=None,
    apply_router_weight_on_input=False, swiglu_limit=None, swiglu_alpha=None, swiglu_beta=None, shared_output=None,
    w1_scale=None, *_, **__,
) -> Call:  # fmt: skip
    launch = "fused_experts"
    # Packed weights have their own where a Hopper GPU's kernels take them.
    if w1.dtype is PACKED and _packed_experts_sm90.can(hidden_states, w1, w1_scale):
        launch = f"{'mxfp4' if is_mxfp4(w1, w1_scale) else 'int4'}_fused_experts"
    return Call(_launch.cdiv(topk_ids.numel(), len(w1)), launch, topk_ids.device)


def suits_decode(call: Call) -> bool:
    """Whether blocks of the fewest rows are the fastest."""
    return call.mean <= launch_parameters(call, "decode")["most_choices"]


def launch_parameters(call: Call, variant: str) -> _launch.Parameters:
    """The launch parameters of a variant."""
    return _launch.parameters(f"{call.launch}_{variant}", call.device, call.mean)


VARIANTS = Variants(describe, Variant("decode", suits=suits_decode), Variant("prefill"))


def supports(problem: FusedExpertsProblem) -> str | None:
    """fp32, bf16 and fp16, accumulated in fp32; fp8 e4m3 and int8 weights, with scales for 32 columns or more, and
    activations as they are or, where the target converts to their dtype, quantised. Activations as they are by int4
    weights, with scales for 32 columns or more, and in bf16 by MXFP4 weights.
    """
    if is_packed(problem.scheme):
        return packed_supports(problem)
    reason, stored = _supports.floats(problem) or _scaled_grouped_gemm.supports(problem), problem.scheme.activation
    if reason is not None or stored is None:
        return reason
    # The length of rows does not matter: those of models are shorter than what a program holds.
    static, columns = stored.group == PER_TENSOR, max(stored.group.columns, 1)
    return can_quantise(
        QuantiseProblem(
            problem.device, problem.dtype, stored.dtype, stored.group, static, columns, target=problem.target
        )
    )


def w1_scale_by_columns(w1_scale: torch.Tensor, **others) -> torch.Tensor:
    return _by_columns(w1_scale, others.get("w1"))


def w2_scale_by_columns(w2_scale: torch.Tensor, **others) -> torch.Tensor:
    return _by_columns(w2_scale, others.get("w2"))


def _by_columns(scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The scales of MXFP4 weights as the kernels read them. Others stay as they are.

    `decode_sm90` takes no scales by rows, so those that it cannot multiply by lie so.
    """
    if not is_mxfp4(weight, scale):
        return scale
    fit = scale.numel() == 0 or scale.max() <= _fp4_sm90.LARGEST_SCALE
    return _mxfp4_grouped_gemm.by_columns(scale) if fit else scale.contiguous()


PREPARE = {"w1_scale": w1_scale_by_columns, "w2_scale": w2_scale_by_columns}


@kernel(ops.fused_experts, name="triton", supports=supports, prepare=PREPARE, variants=VARIANTS)
def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    swiglu_limit: float | None = None,
    swiglu_alpha: float | None = None,
    swiglu_beta: float | None = None,
    shared_output: torch.Tensor | None = None,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    quant_dtype: torch.dtype | None = None,
    group_shape: list[int] | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    w1_zero_point: torch.Tensor | None = None,
    w2_zero_point: torch.Tensor | None = None,
    variant: str | None = None,
) -> torch.Tensor:
    act, parameters = _activations.find(activation, swiglu_limit, swiglu_alpha, swiglu_beta)
    check_arguments(
        hidden_states, w1, w2, topk_weights, topk_ids, activation, w1_bias, w2_bias, apply_router_weight_on_input,
        shared_output, w1_scale, w2_scale, out_dtype, quant_dtype, group_shape, a1_scale, a2_scale, w1_zero_point,
        w2_zero_point,
    )  # fmt: skip
    call = describe(hidden_states, w1, w2, topk_weights, topk_ids, w1_scale=w1_scale)
    block_size = launch_parameters(call, VARIANTS.pick(call, variant))["block"]
    order = permute(topk_ids, len(w1), block_size, expert_map)
    x, weights = hidden_states, topk_weights
    if apply_router_weight_on_input:
        x, weights = (x * weights).to(x.dtype), torch.ones_like(weights)

    def fresh(weight: torch.Tensor) -> torch.Tensor:
        """Memory for a product. The rows of choices whose experts are not here hold anything, to the last product."""
        return hidden_states.new_empty((topk_ids.numel(), weight.shape[1]))

    x, x_scale = (x, None) if quant_dtype is None else quantise(x, quant_dtype, group_shape, a1_scale)
    middle = fresh(w1)
    write_products(middle, x, w1, Order(*order, topk_ids.shape[1]), w1_bias, w1_scale, x_scale, w1_zero_point)
    if quant_dtype is not None and act is ops.silu_and_mul:
        middle, middle_scale = silu_and_mul_quant(middle, quant_dtype, group_shape, a2_scale)
    else:
        middle, middle_scale = ACTIVATIONS[act.name](middle, **parameters), None
        if quant_dtype is not None:
            middle, middle_scale = quantise(middle, quant_dtype, group_shape, a2_scale)
    results = fresh(w2)
    write_products(results, middle, w2, Order(*order, 1), w2_bias, w2_scale, middle_scale, w2_zero_point)
    results = results.view(*topk_ids.shape, hidden_states.shape[1])
    return combine(results, weights, shared_output, topk_ids, expert_map)
