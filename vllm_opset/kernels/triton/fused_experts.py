"""fused_experts as the composition of other ops: permute, grouped_gemm, an activation, and combine.

If the scheme quantises activations, quantise comes before each product. After SiLU, silu_and_mul_quant does both.

- `decode`: few choices for each expert, in blocks of the fewest rows that tensor cores take.
- `prefill`: more choices, in larger blocks.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _launch, _supports
from vllm_opset.kernels.triton._products import mxfp4_words_sm90
from vllm_opset.kernels.triton._products.scaled import supports as supports_scaled
from vllm_opset.kernels.triton._products.tiles import Order
from vllm_opset.kernels.triton.combine import combine
from vllm_opset.kernels.triton.gelu import gelu
from vllm_opset.kernels.triton.gelu_and_mul import gelu_and_mul
from vllm_opset.kernels.triton.gelu_tanh import gelu_tanh
from vllm_opset.kernels.triton.grouped_gemm import (
    is_packed,
    mxfp4,
    packed_sm90,
    packed_supports,
    wide_decode_sm90,
    write_products,
)
from vllm_opset.kernels.triton.permute import permute
from vllm_opset.kernels.triton.quantise import quantise
from vllm_opset.kernels.triton.quantise import supports as can_quantise
from vllm_opset.kernels.triton.relu2 import relu2
from vllm_opset.kernels.triton.silu_and_mul import silu_and_mul
from vllm_opset.kernels.triton.silu_and_mul_quant import silu_and_mul_quant
from vllm_opset.kernels.triton.silu_and_mul_with_clamp import silu_and_mul_with_clamp
from vllm_opset.kernels.triton.swigluoai_and_mul import swigluoai_and_mul
from vllm_opset.kernels.triton.swiglustep_and_mul import swiglustep_and_mul
from vllm_opset.ops.contract import Op
from vllm_opset.ops.moe._fused_experts_arguments import FusedExpertsArguments, takes_arguments
from vllm_opset.ops.moe.fused_experts import FusedExpertsProblem
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


def describe_arguments(args: FusedExpertsArguments) -> Call:
    return Call(_launch.cdiv(args.topk_ids.numel(), len(args.w1)), _launch_of(args), args.topk_ids.device)


def _launch_of(args: FusedExpertsArguments) -> str:
    """The name of the launches. Packed weights have their own where a Hopper GPU's kernels take them."""
    x, weight, scale = args.hidden_states, args.w1, args.w1_scale
    if weight.dtype is not PACKED or not packed_sm90.can(x, weight, scale):
        return "fused_experts"
    if is_mxfp4(weight, scale):
        return "mxfp4_fused_experts"
    wide = wide_decode_sm90.can(x, weight, scale, min(wide_decode_sm90.BLOCK_SIZES))
    return "wide_int4_fused_experts" if wide else "int4_fused_experts"


describe = takes_arguments(describe_arguments)


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
    reason, stored = _supports.floats(problem) or supports_scaled(problem), problem.scheme.activation
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
    fit = scale.numel() == 0 or scale.max() <= mxfp4_words_sm90.LARGEST_SCALE
    return mxfp4.by_columns(scale) if fit else scale.contiguous()


PREPARE = {"w1_scale": w1_scale_by_columns, "w2_scale": w2_scale_by_columns}


@kernel(ops.fused_experts, name="triton", supports=supports, prepare=PREPARE, variants=VARIANTS)
@takes_arguments
def fused_experts(args: FusedExpertsArguments, variant: str | None = None) -> torch.Tensor:
    act, parameters = args.check()
    call = describe_arguments(args)
    block_size = launch_parameters(call, VARIANTS.pick(call, variant))["block"]
    topk_ids = args.topk_ids
    order = permute(topk_ids, len(args.w1), block_size, args.expert_map)
    x, weights = args.hidden_states, args.topk_weights
    if args.apply_router_weight_on_input:
        x, weights = (x * weights).to(x.dtype), torch.ones_like(weights)
    x_scale = None
    if args.quant_dtype is not None:
        x, x_scale = quantise(x, args.quant_dtype, args.group_shape, args.a1_scale)
    middle = _memory_for_products(args, args.w1)
    of_tokens, of_choices = Order(*order, topk_ids.shape[1]), Order(*order, 1)
    write_products(middle, x, args.w1, of_tokens, args.w1_bias, args.w1_scale, x_scale, args.w1_zero_point)
    middle, middle_scale = _activated(args, act, middle, parameters)
    results = _memory_for_products(args, args.w2)
    write_products(results, middle, args.w2, of_choices, args.w2_bias, args.w2_scale, middle_scale, args.w2_zero_point)
    results = results.view(*topk_ids.shape, args.hidden_states.shape[1])
    return combine(results, weights, args.shared_output, topk_ids, args.expert_map)


def _memory_for_products(args: FusedExpertsArguments, weight: torch.Tensor) -> torch.Tensor:
    """A row for each choice. Those of choices whose experts are not here hold anything, to the last product."""
    return args.hidden_states.new_empty((args.topk_ids.numel(), weight.shape[1]))


def _activated(
    args: FusedExpertsArguments, act: Op, x: torch.Tensor, parameters: Mapping[str, float | str]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the second product multiplies, and its scales if it is quantised."""
    if args.quant_dtype is None:
        return ACTIVATIONS[act.name](x, **parameters), None
    if act is ops.silu_and_mul:
        return silu_and_mul_quant(x, args.quant_dtype, args.group_shape, args.a2_scale)
    return quantise(ACTIVATIONS[act.name](x, **parameters), args.quant_dtype, args.group_shape, args.a2_scale)
