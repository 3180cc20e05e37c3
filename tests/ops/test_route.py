"""The reference of route beside the routers of models in `transformers`."""

import pytest
import torch
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from vllm_opset import ops

NUM_TOKENS, NUM_EXPERTS, TOP_K, NUM_GROUPS = 50, 32, 4, 4
# The router multiplies by the identity, so its hidden states are the logits.
SIZES = {"hidden_size": NUM_EXPERTS, "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K}
GROUPS = {"n_group": NUM_GROUPS, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
SIGMOID = {
    "scoring_func": "sigmoid", "renormalize": True, "routed_scaling_factor": 2.5, "num_expert_group": NUM_GROUPS,
    "topk_group": 2,
}  # fmt: skip
AS_IT_IS = {"norm_topk_prob": False}, {"renormalize": False}

of_each_model = pytest.mark.parametrize(
    ("router", "model", "settings", "arguments"),
    [
        pytest.param(DeepseekV3TopkRouter, "deepseek_v3", GROUPS, SIGMOID, id="DeepSeek V3"),
        pytest.param(Glm4MoeTopkRouter, "glm4_moe", GROUPS, SIGMOID, id="GLM-4-MoE"),
        pytest.param(GptOssTopKRouter, "gpt_oss", {}, {}, id="gpt-oss"),
        pytest.param(GraniteMoeTopKRouter, "granitemoe", {}, {}, id="Granite-MoE"),
        pytest.param(MixtralTopKRouter, "mixtral", {}, {}, id="Mixtral"),
        pytest.param(OlmoeTopKRouter, "olmoe", *AS_IT_IS, id="OLMoE"),
        pytest.param(Qwen2MoeTopKRouter, "qwen2_moe", *AS_IT_IS, id="Qwen2-MoE"),
        pytest.param(Qwen3MoeTopKRouter, "qwen3_moe", {"norm_topk_prob": True}, {}, id="Qwen3-MoE"),
        pytest.param(Qwen3MoeTopKRouter, "qwen3_moe", *AS_IT_IS, id="Qwen3-MoE, as it is"),
    ],
)


@of_each_model
@pytest.mark.parametrize("mean", [0, -200], ids=["scores", "sigmoids of zero"])
def test_experts_and_weights_are_those_of_the_model(router, model, settings, arguments, mean):
    torch.manual_seed(0)
    logits, bias = mean + 2 * torch.randn(NUM_TOKENS, NUM_EXPERTS), 0.3 * torch.randn(NUM_EXPERTS)
    ours, theirs = routed(router, model, settings, arguments, logits, bias)
    torch.testing.assert_close(by_expert(*ours), by_expert(*theirs))


@of_each_model
def test_of_equal_scores_the_lower_experts_are_chosen(router, model, settings, arguments):
    """A model may choose others of the same scores, so the scores and weights are compared, whichever experts'.

    The bias differs between groups and not within them: each has equal scores, and no two groups are equal.
    """
    torch.manual_seed(0)
    logits = torch.randn(NUM_TOKENS, NUM_EXPERTS).round()
    bias = 0.3 * torch.randn(NUM_GROUPS).repeat_interleave(NUM_EXPERTS // NUM_GROUPS)
    (weights, ids), (their_weights, their_ids) = routed(router, model, settings, arguments, logits, bias)
    scores = logits.sigmoid() + bias if "n_group" in settings else logits
    assert torch.equal(scores.gather(1, ids.long()), scores.gather(1, their_ids).sort(descending=True).values)
    torch.testing.assert_close(weights.sort().values, their_weights.sort().values)
    chosen = torch.zeros(NUM_TOKENS, NUM_EXPERTS, dtype=torch.bool).scatter(1, ids.long(), True)
    # [token, an expert that is chosen, an expert that is not, of the same score]
    equal = (scores.unsqueeze(2) == scores.unsqueeze(1)) & chosen.unsqueeze(2) & ~chosen.unsqueeze(1)
    assert equal.flatten(1).any(dim=1).sum() > NUM_TOKENS // 2, "few tokens leave out an expert of equal score"
    assert not equal.tril().any(), "a lower expert is left out"


def routed(
    router: type, model: str, settings: dict, arguments: dict, logits: torch.Tensor, bias: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """The weights and experts by ops.route, and those by a model's router. bias: for a model that has one."""
    theirs, arguments = router(AutoConfig.for_model(model, **SIZES, **settings)), dict(arguments)
    theirs.weight.data = torch.eye(NUM_EXPERTS)
    if "n_group" in settings:
        theirs.e_score_correction_bias = arguments["e_score_correction_bias"] = bias
    with torch.no_grad():
        _, weights, ids = theirs(logits)
    return ops.route(logits, TOP_K, **arguments), (weights, ids)


def by_expert(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The weight of each expert, zero for those that were not chosen: models leave the order of choices open."""
    return torch.zeros(NUM_TOKENS, NUM_EXPERTS).scatter(1, ids.long(), weights.float())
