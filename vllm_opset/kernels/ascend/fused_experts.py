"""fused_experts by npu_moe_init_routing_v2, npu_grouped_matmul twice, and npu_moe_finalize_routing.

Source: the docs of these operators, in this order:

- npu_moe_init_routing_v2 sorts copies of the tokens by expert and counts each expert's. Choices outside of
  `active_expert_range` are not copied, and what is after the copies is undefined. So a choice of an absent expert
  becomes one of an expert after the last, outside of that range. With `quant_mode` 1, the copies are int8 with a scale
  for each, as npu_dynamic_quant gives them.

- npu_grouped_matmul multiplies the rows of each group by its weight, which may be given as the transpose of a
  contiguous one. The groups must end at the last row, so the undefined rows belong to the last expert. Biases are fp16
  for fp16, and fp32 for others. Int8 weights have scales in bf16 for results in bf16, and in fp32 for fp16. Biases of
  int8 would have to be int32, so PyTorch adds them. The docs say that scales and biases have one dimension. CANN has
  [groups, n] for one weight of three dimensions.

- npu_moe_finalize_routing adds each token's rows, multiplied by weights in the rows' dtype. Its indices must be of rows
  that exist. So absent choices get the last row, which is set to zeros if there are any. PyTorch adds the result of
  shared experts, because docs and CANN disagree on which of two summands may be given alone.

Between the products come npu_swiglu or npu_geglu; other activations run as their references.
"""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.ascend import _constraints
from vllm_opset.kernels.ascend._operators import npu
from vllm_opset.kernels.ascend.gelu_and_mul import gelu_and_mul
from vllm_opset.kernels.ascend.silu_and_mul import silu_and_mul
from vllm_opset.ops.moe._fused_experts_arguments import FusedExpertsArguments, takes_arguments
from vllm_opset.ops.moe.fused_experts import FusedExpertsProblem
from vllm_opset.ops.moe.permute import places
from vllm_opset.ops.schemes import INT8, NONE, PER_ROW, Quantised, Scheme

OPERATORS = ("npu_moe_init_routing_v2", "npu_grouped_matmul", "npu_swiglu", "npu_geglu", "npu_moe_finalize_routing")
W8A8 = Scheme(Quantised(INT8, PER_ROW), Quantised(INT8, PER_ROW))
ACTIVATIONS = {"silu_and_mul": silu_and_mul, "gelu_and_mul": gelu_and_mul}
# docs of npu_moe_init_routing_v2
NOT_QUANTISED, DYNAMIC = -1, 1
COUNTS = 1


def supports(problem: FusedExpertsProblem) -> str | None:
    """fp32, bf16 and fp16, or int8 per channel by int8 per token in bf16 and fp16; A2 and A3; up to 1,024 experts."""
    if problem.scheme not in (NONE, W8A8):
        return f"npu_grouped_matmul serves {W8A8}, or unquantised weights, not {problem.scheme}"
    operators = OPERATORS if problem.scheme == NONE else (*OPERATORS, "npu_dynamic_quant")
    widest = max(problem.hidden_size, problem.intermediate_size)
    reasons = (_constraints.refused(operator, problem) for operator in operators)
    return _constraints.grouped_matmul(problem.num_experts, widest) or next(filter(None, reasons), None)


def scale_for_results(scale: torch.Tensor, out_dtype: torch.dtype | None = None, **others) -> torch.Tensor:
    """The scales of int8 weights in the dtype that npu_grouped_matmul takes for results in out_dtype."""
    return scale if out_dtype is None else scale.to(_constraints.grouped_scale_dtype(out_dtype))


PREPARE = {"w1_scale": scale_for_results, "w2_scale": scale_for_results}


@kernel(ops.fused_experts, name="ascend", supports=supports, prepare=PREPARE)
@takes_arguments
def fused_experts(args: FusedExpertsArguments) -> torch.Tensor:
    act, parameters = args.check()
    x, weights, topk_ids, num_experts = args.hidden_states, args.topk_weights, args.topk_ids, len(args.w1)
    dtype = x.dtype
    if not topk_ids.numel():
        return x.new_empty(x.shape)
    if args.apply_router_weight_on_input:
        x, weights = (x * weights).to(dtype), torch.ones_like(weights)
    experts = places(topk_ids, args.expert_map).int()
    absent = experts < 0
    x, rows, ends, x_scale = _sorted(x, experts.masked_fill(absent, num_experts), num_experts, args.quant_dtype)
    middle = _products(x, args.w1, args.w1_bias, ends, dtype, args.w1_scale, x_scale)
    middle = ACTIVATIONS.get(act.name, act.reference)(middle, **parameters)
    middle, scale = (middle, None) if args.quant_dtype is None else npu.npu_dynamic_quant(middle)
    results = _products(middle, args.w2, args.w2_bias, ends, dtype, args.w2_scale, scale)
    total = _combined(results, rows, weights, absent)
    return total if args.shared_output is None else total + args.shared_output


def _sorted(
    x: torch.Tensor, experts: torch.Tensor, num_experts: int, quant_dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tokens sorted by expert, the row of each choice [choices], the end of each expert's rows, and scales.

    experts: int32 [num_tokens, top_k], num_experts for choices to leave out, whose rows are −1.
    """
    x, rows, counts, scales = npu.npu_moe_init_routing_v2(
        x.contiguous(),
        experts,
        active_num=experts.numel(),
        expert_num=num_experts + 1,
        expert_tokens_num_type=COUNTS,
        expert_tokens_num_flag=True,
        quant_mode=NOT_QUANTISED if quant_dtype is None else DYNAMIC,
        active_expert_range=[0, num_experts],
    )
    ends = counts.cumsum(0)
    ends[-1:].fill_(experts.numel())
    return x, rows, ends, scales


def _products(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ends: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
    x_scale: torch.Tensor | None,
) -> torch.Tensor:
    """The rows of x, sorted by expert, times the weights of their experts, plus their biases."""
    how = {}
    if scale is not None:
        how = {"scale": [scale.flatten(1)], "per_token_scale": [x_scale], "output_dtype": dtype}
    elif bias is not None:
        how = {"bias": [bias.to(_constraints.grouped_bias_dtype(dtype))]}
    (out,) = npu.npu_grouped_matmul(
        [x], [weight.transpose(1, 2)], group_list=ends, split_item=3, group_type=0, group_list_type=0, **how
    )
    if scale is None or bias is None:
        return out
    return out + bias[torch.searchsorted(ends, torch.arange(len(x), device=ends.device), right=True)]


def _combined(results: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, absent: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each token's rows. If a choice is absent, the last row is one of those that are undefined."""
    results[-1].masked_fill_(absent.any(), 0)
    rows = rows.masked_fill(rows < 0, len(results) - 1).view(absent.shape)
    if _constraints.FINALIZE_DROP_PAD_MODE == _constraints.BY_COLUMNS:
        rows = rows.t()
    return npu.npu_moe_finalize_routing(
        results,
        None,
        None,
        None,
        weights.masked_fill(absent, 0).to(results.dtype),
        rows.flatten(),
        None,
        _constraints.FINALIZE_DROP_PAD_MODE,
    )
