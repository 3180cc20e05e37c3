"""fused_experts on tokens sorted by expert: two products for each expert that has tokens.

A CPU can read the number of each expert's tokens, so no block is padded and no weight of an idle expert is read.
Quantised weights are dequantised once, as for `linear`.
"""

import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.ops.moe import _activations
from vllm_opset.ops.moe._quantised import as_stored, check_scale, weight_of
from vllm_opset.ops.moe.fused_experts import FusedExpertsProblem, check_arguments
from vllm_opset.ops.moe.permute import places
from vllm_opset.ops.schemes import FP4, FP8, INT8, UINT4, values_shape


def supports(problem: FusedExpertsProblem) -> str | None:
    """fp32, bf16 and fp16; fp8 e4m3, int8, int4 and MXFP4 weights, dequantised once."""
    weight = problem.scheme.weight
    known = weight is None or weight.dtype in (FP8, INT8, UINT4, FP4)
    return None if known else f"it dequantises fp8 e4m3, int8, int4 and MXFP4, not {weight}"


def dequantised_w1(w1: torch.Tensor, w1_scale=None, out_dtype=None, w1_zero_point=None, **others) -> torch.Tensor:
    return _dequantised("w1_scale", w1, w1_scale, out_dtype, w1_zero_point)


def dequantised_w2(w2: torch.Tensor, w2_scale=None, out_dtype=None, w2_zero_point=None, **others) -> torch.Tensor:
    return _dequantised("w2_scale", w2, w2_scale, out_dtype, w2_zero_point)


def _dequantised(
    name: str,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    dtype: torch.dtype | None,
    zero_point: torch.Tensor | None,
) -> torch.Tensor:
    """Weights times their scales, in `dtype`. Weights without a scale stay as they are."""
    if scale is None or dtype is None:
        return weight
    check_scale(name, weight, scale, zero_point)
    out = weight.new_empty(values_shape(weight), dtype=dtype)
    for expert in range(len(weight)):
        out[expert] = weight_of(weight, scale, expert, dtype, zero_point)
    return out


@kernel(ops.fused_experts, name="cpu", supports=supports, prepare={"w1": dequantised_w1, "w2": dequantised_w2})
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
) -> torch.Tensor:
    act, parameters = _activations.find(activation, swiglu_limit, swiglu_alpha, swiglu_beta)
    check_arguments(
        hidden_states, w1, w2, topk_weights, topk_ids, activation, w1_bias, w2_bias, apply_router_weight_on_input,
        shared_output, w1_scale, w2_scale, out_dtype, quant_dtype, group_shape, a1_scale, a2_scale, w1_zero_point,
        w2_zero_point,
    )  # fmt: skip
    # The absent expert −1 comes first; its choices keep a result of zero.
    order, sizes = _by_expert(places(topk_ids, expert_map).flatten() + 1, len(w1) + 1)
    x = hidden_states[order // topk_ids.shape[1]]
    weights = topk_weights.flatten()
    if apply_router_weight_on_input:
        x *= weights[order].unsqueeze(1)
    x = as_stored(x, quant_dtype, group_shape, a1_scale)
    middle = act(_products(x, w1, w1_bias, sizes), **parameters)
    middle = as_stored(middle, quant_dtype, group_shape, a2_scale)
    results = hidden_states.new_empty(x.shape)
    results[order] = _products(middle, w2, w2_bias, sizes)
    results = results.view(*topk_ids.shape, results.shape[1]).float()
    if not apply_router_weight_on_input:
        results *= topk_weights.unsqueeze(-1)
    total = results.sum(dim=1)
    return (total if shared_output is None else total.add_(shared_output)).to(hidden_states.dtype)


def _by_expert(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, list[int]]:
    """The choices sorted by expert, and the number of each expert's choices."""
    return experts.argsort(stable=True), experts.bincount(minlength=num_experts).tolist()


def _products(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sizes: list[int]) -> torch.Tensor:
    """The rows of x, sorted by expert, times the weights of their experts. The first sizes[0] rows have no expert."""
    out = x.new_zeros(len(x), weight.shape[1])
    end = sizes[0]
    for expert, size in enumerate(sizes[1:]):
        if size:
            rows, end = slice(end, end + size), end + size
            out[rows] = F.linear(x[rows], weight[expert], None if bias is None else bias[expert])
    return out
