"""fused_experts on tokens sorted by expert: two products for each expert that has tokens.

A CPU can read the number of each expert's tokens, so no block is padded and no weight of an idle expert is read.
Quantised weights are dequantised once, as for `linear`.
"""

import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.ops.moe._fused_experts_arguments import FusedExpertsArguments, takes_arguments
from vllm_opset.ops.moe._quantised import as_stored, check_scale, weight_of
from vllm_opset.ops.moe.fused_experts import FusedExpertsProblem
from vllm_opset.ops.moe.permute import ABSENT, places
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
@takes_arguments
def fused_experts(args: FusedExpertsArguments) -> torch.Tensor:
    act, parameters = args.check()
    # The absent expert −1 comes first; its choices keep a result of zero, whatever their weights are.
    experts = places(args.topk_ids, args.expert_map)
    weights = torch.where(experts == ABSENT, 0, args.topk_weights)
    order, sizes = _by_expert(experts.flatten() + 1, len(args.w1) + 1)
    x = args.hidden_states[order // args.topk_ids.shape[1]]
    if args.apply_router_weight_on_input:
        x *= weights.flatten()[order].unsqueeze(1)
    x = as_stored(x, args.quant_dtype, args.group_shape, args.a1_scale)
    middle = act(_products(x, args.w1, args.w1_bias, sizes), **parameters)
    middle = as_stored(middle, args.quant_dtype, args.group_shape, args.a2_scale)
    results = x.new_empty(x.shape)
    results[order] = _products(middle, args.w2, args.w2_bias, sizes)
    results = results.view(*args.topk_ids.shape, results.shape[1]).float()
    if not args.apply_router_weight_on_input:
        results *= weights.unsqueeze(-1)
    total = results.sum(dim=1)
    return (total if args.shared_output is None else total.add_(args.shared_output)).to(args.hidden_states.dtype)


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
