"""fused_experts in C++: each weight of an expert that has tokens is read once, where it is.

Quantised weights stay as they are stored, and their rows are dequantised where they are multiplied. The activation
between the products is C++ for SiLU, and otherwise PyTorch's.
"""

import ctypes

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.cpp._build import INT, POINTER, function
from vllm_opset.kernels.cpp._stored import Weight, can_stay, described
from vllm_opset.kernels.cpp._types import TYPES, supports_type
from vllm_opset.kernels.cpp.silu_and_mul import silu_and_mul
from vllm_opset.kernels.cpu import fused_experts as in_torch
from vllm_opset.ops.moe._fused_experts_arguments import FusedExpertsArguments, takes_arguments
from vllm_opset.ops.moe._quantised import as_stored, check_scale
from vllm_opset.ops.moe.fused_experts import FusedExpertsProblem
from vllm_opset.ops.schemes import values_shape

up = function("experts_up", INT, *[POINTER] * 6, *[INT] * 7, returns=INT)
down = function("experts_down", INT, *[POINTER] * 8, *[INT] * 6)


def supports(problem: FusedExpertsProblem) -> str | None:
    """fp32 and bf16; fp8 e4m3, int8, int4 and MXFP4 weights, dequantised where they are multiplied."""
    return supports_type(problem) or in_torch.supports(problem)


def stored_w1(w1: torch.Tensor, w1_scale=None, w1_zero_point=None, **others) -> torch.Tensor:
    if _can_stay("w1_scale", w1, w1_scale, w1_zero_point):
        return w1.contiguous()
    return in_torch.dequantised_w1(w1, w1_scale, w1_zero_point=w1_zero_point, **others).contiguous()


def stored_w2(w2: torch.Tensor, w2_scale=None, w2_zero_point=None, **others) -> torch.Tensor:
    if _can_stay("w2_scale", w2, w2_scale, w2_zero_point):
        return w2.contiguous()
    return in_torch.dequantised_w2(w2, w2_scale, w2_zero_point=w2_zero_point, **others).contiguous()


def _can_stay(name: str, weight: torch.Tensor, scale: torch.Tensor | None, zero_point: torch.Tensor | None) -> bool:
    if scale is None:
        return False
    check_scale(name, weight, scale, zero_point)
    return can_stay(weight, scale)


@kernel(ops.fused_experts, name="cpp", supports=supports, prepare={"w1": stored_w1, "w2": stored_w2})
@takes_arguments
def fused_experts(args: FusedExpertsArguments) -> torch.Tensor:
    act, parameters = args.check()
    x, topk_weights, topk_ids = args.hidden_states, args.topk_weights, args.topk_ids
    if args.apply_router_weight_on_input:
        x, topk_weights = (x * topk_weights).to(x.dtype), torch.ones_like(topk_weights)
    x = as_stored(x, args.quant_dtype, args.group_shape, args.a1_scale)
    expert_map = args.expert_map
    chosen = (
        topk_ids.data_ptr(), _address(expert_map), 0 if expert_map is None else len(expert_map), *topk_ids.shape,
        len(args.w1),
    )  # fmt: skip
    first = described(args.w1, args.w1_scale, args.w1_zero_point)
    second = described(args.w2, args.w2_scale, args.w2_zero_point)
    middle = _up(x, first, values_shape(args.w1), args.w1_bias, chosen, topk_ids)
    middle = silu_and_mul(middle) if act is ops.silu_and_mul else act(middle, **parameters)
    middle = as_stored(middle, args.quant_dtype, args.group_shape, args.a2_scale)
    y = torch.empty(x.shape, dtype=x.dtype)
    down(
        TYPES[x.dtype], middle.data_ptr(), ctypes.byref(second), _address(args.w2_bias), topk_weights.data_ptr(),
        _address(args.shared_output), y.data_ptr(), *chosen, values_shape(args.w2)[2], args.w2.shape[1],
    )  # fmt: skip
    return y


def _up(
    x: torch.Tensor,
    w1: Weight,
    shape: tuple[int, ...],
    bias: torch.Tensor | None,
    chosen: tuple,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """The first product, a row for each choice. The rows of absent experts hold anything. shape: of w1's values."""
    _, out_features, in_features = shape
    y = torch.empty((topk_ids.numel(), out_features), dtype=x.dtype)
    lost = up(
        TYPES[x.dtype], x.data_ptr(), ctypes.byref(w1), _address(bias), y.data_ptr(), *chosen, in_features,
        out_features, x.stride(0),
    )  # fmt: skip
    if lost >= 0:
        raise IndexError(f"choice {lost} is expert {topk_ids.flatten()[lost]}, which does not exist")
    return y


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
