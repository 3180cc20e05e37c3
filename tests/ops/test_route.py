"""The reference of route beside the routers of models in `transformers`."""

import pytest
import torch
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from vllm_opset import ops

NUM_TOKENS, NUM_EXPERTS, TOP_K = 50, 32, 4
# The router multiplies by the identity, so its hidden states are the logits.
SIZES = {"hidden_size": NUM_EXPERTS, "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K}
GROUPS = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
SIGMOID = {
    "scoring_func": "sigmoid", "renormalize": True, "routed_scaling_factor": 2.5, "num_expert_group": 4, "topk_group": 2
}  # fmt: skip


@pytest.mark.parametrize(
    ("router", "model", "settings", "arguments"),
    [
        pytest.param(DeepseekV3TopkRouter, "deepseek_v3", GROUPS, SIGMOID, id="DeepSeek V3"),
        pytest.param(Glm4MoeTopkRouter, "glm4_moe", GROUPS, SIGMOID, id="GLM-4-MoE"),
        pytest.param(GptOssTopKRouter, "gpt_oss", {}, {}, id="gpt-oss"),
        pytest.param(Qwen3MoeTopKRouter, "qwen3_moe", {"norm_topk_prob": True}, {}, id="Qwen3-MoE"),
        pytest.param(
            Qwen3MoeTopKRouter, "qwen3_moe", {"norm_topk_prob": False}, {"renormalize": False}, id="Qwen3-MoE, as it is"
        ),
    ],
)
def test_experts_and_weights_are_those_of_the_model(router, model, settings, arguments):
    torch.manual_seed(0)
    theirs = router(AutoConfig.for_model(model, **SIZES, **settings))
    theirs.weight.data = torch.eye(NUM_EXPERTS)
    logits, arguments = 2 * torch.randn(NUM_TOKENS, NUM_EXPERTS), dict(arguments)
    if "n_group" in settings:
        theirs.e_score_correction_bias = arguments["e_score_correction_bias"] = 0.3 * torch.randn(NUM_EXPERTS)
    with torch.no_grad():
        _, weights, ids = theirs(logits)
    torch.testing.assert_close(by_expert(*ops.route(logits, TOP_K, **arguments)), by_expert(weights, ids))


def by_expert(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The weight of each expert, zero for those that were not chosen: models leave the order of choices open."""
    return torch.zeros(NUM_TOKENS, NUM_EXPERTS).scatter(1, ids.long(), weights.float())
