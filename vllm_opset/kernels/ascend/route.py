"""route by npu_moe_gating_top_k_softmax, or by npu_moe_gating_top_k for sigmoids, biases and groups.

The kernel "ascend" uses npu_moe_gating_top_k_softmax. Source: its docs: the k largest of the softmax of each row, in
their order, for k up to 1024. It does not renormalise, so PyTorch divides.

The kernel "ascend_gating_top_k" uses npu_moe_gating_top_k, also for softmax if an override names it. Source: its docs,
and CANN's page of aclnnMoeGatingTopK for its formula. It renormalises sigmoids, and softmaxes not. It returns all
scores if it is asked to, and from these come the weights of sigmoids that are not renormalised.

Logits are converted to fp32, because the operators return weights in the dtype of the logits. The docs do not say
which of equal scores comes first. In the tests of CANN's open repository ops-transformer it is the lower expert. The
operators choose by the scores. So logits whose scores are equal in fp32, such as those that are more than 100 below the
largest, are ties, unlike in the contract. Not documented: what becomes of a row with NaN.
"""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.ascend import _constraints
from vllm_opset.kernels.ascend._operators import npu
from vllm_opset.ops.moe.route import EPSILON, RouteProblem, check_arguments, renormalised

# docs of npu_moe_gating_top_k: norm_type, and group_select_mode by the number of scores that make a group's.
NORM_TYPES = {"softmax": 0, "sigmoid": 1}
GROUP_SELECT_MODES = {1: 0, 2: 1}


def supports(problem: RouteProblem) -> str | None:
    """Softmax without a bias or groups, on A2 and A3; up to 1,024 chosen experts."""
    if problem.scoring_func != "softmax" or problem.bias or problem.num_expert_group > 1:
        return "npu_moe_gating_top_k_softmax knows neither sigmoids, biases nor groups"
    sizes = _constraints.gating_softmax(problem.num_experts, problem.top_k)
    return sizes or _constraints.refused("npu_moe_gating_top_k_softmax", problem)


@kernel(ops.route, name="ascend", supports=supports)
def route(
    router_logits: torch.Tensor,
    top_k: int,
    scoring_func: str = "softmax",
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
    num_expert_group: int = 1,
    topk_group: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_arguments(router_logits, top_k, scoring_func, e_score_correction_bias, num_expert_group, topk_group)
    if not len(router_logits):
        return _nothing(router_logits, top_k)
    weights, ids, _ = npu.npu_moe_gating_top_k_softmax(router_logits.float().contiguous(), k=top_k)
    if renormalize:
        weights = renormalised(weights)
    return weights * routed_scaling_factor, ids


def supports_gating(problem: RouteProblem) -> str | None:
    """Softmax and sigmoid, biases and groups of three experts or more, on A2 and A3; up to 2,048 experts."""
    sizes = _constraints.gating(problem.num_experts, problem.top_k, problem.num_expert_group, problem.topk_group)
    return sizes or _constraints.refused("npu_moe_gating_top_k", problem)


@kernel(ops.route, name="ascend_gating_top_k", supports=supports_gating)
def gating_top_k(
    router_logits: torch.Tensor,
    top_k: int,
    scoring_func: str = "softmax",
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
    num_expert_group: int = 1,
    topk_group: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_arguments(router_logits, top_k, scoring_func, e_score_correction_bias, num_expert_group, topk_group)
    if not len(router_logits):
        return _nothing(router_logits, top_k)
    bias = e_score_correction_bias
    needs_scores = scoring_func == "sigmoid" and not renormalize
    weights, ids, scores = npu.npu_moe_gating_top_k(
        router_logits.float().contiguous(),
        top_k,
        bias=None if bias is None else bias.float().contiguous(),
        k_group=topk_group,
        group_count=num_expert_group,
        group_select_mode=GROUP_SELECT_MODES[1 if bias is None else 2],
        norm_type=NORM_TYPES[scoring_func],
        out_flag=needs_scores,
        eps=EPSILON,
    )
    if needs_scores:
        weights = scores.gather(1, ids.long())
    if renormalize and scoring_func == "softmax":
        weights = renormalised(weights)
    return weights * routed_scaling_factor, ids


def _nothing(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The results for no tokens, for which no operator is documented."""
    return tuple(router_logits.new_empty((0, top_k), dtype=dtype) for dtype in (torch.float32, torch.int32))
