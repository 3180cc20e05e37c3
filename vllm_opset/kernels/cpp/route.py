"""route in one pass over the logits of each token."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.cpp._build import FLOAT, INT, POINTER, function
from vllm_opset.kernels.cpp._types import TYPES, supports_type
from vllm_opset.ops.moe.route import check_arguments

run = function("route", INT, *[POINTER] * 4, *[INT] * 8, FLOAT)


@kernel(ops.route, name="cpp", supports=supports_type)
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
    logits = router_logits if router_logits.stride(1) == 1 else router_logits.contiguous()
    bias = None if e_score_correction_bias is None else e_score_correction_bias.float().contiguous()
    num_tokens, num_experts = logits.shape
    topk_weights = torch.empty((num_tokens, top_k), dtype=torch.float32)
    topk_ids = torch.empty((num_tokens, top_k), dtype=torch.int32)
    run(
        TYPES[logits.dtype], logits.data_ptr(), None if bias is None else bias.data_ptr(), topk_weights.data_ptr(),
        topk_ids.data_ptr(), num_tokens, logits.stride(0), num_experts, top_k, num_expert_group, topk_group,
        scoring_func == "softmax", renormalize, routed_scaling_factor,
    )  # fmt: skip
    return topk_weights, topk_ids
