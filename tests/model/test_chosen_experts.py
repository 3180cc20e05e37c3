"""Experts that a bound layer chooses, and how it weighs them, where a model says otherwise than most."""

from unittest.mock import Mock

import pytest
import torch
from expert_layers import HIDDEN_SIZE, NUM_EXPERTS, TOP_K, by_hand
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod

from vllm_opset.model import bound_experts
from vllm_opset.platform import expert_loading
from vllm_opset.unsupported import Refusal

pytestmark = [pytest.mark.window, pytest.mark.usefixtures("alone")]


@pytest.mark.parametrize(
    ("arguments", "num_groups", "factor"),
    [
        ({"num_expert_group": 4, "topk_group": 2}, 4, 1),
        ({"num_expert_group": 3, "topk_group": 1}, 1, 1),  # of 8 experts, they make no groups
        ({"num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}, 4, 1.5),
    ],
    ids=str,
)
def test_bound_experts_are_chosen_of_the_best_groups(arguments, num_groups, factor, layer):
    made = layer(use_grouped_topk=True, renormalize=True, **arguments)
    assert not bound_experts.bind(torch.nn.ModuleList([made]))
    x, logits = torch.randn(17, HIDDEN_SIZE), torch.randn(17, NUM_EXPERTS)
    _, found = made._apply_quant_method(x, logits, None)
    scores = logits.double().softmax(-1)
    if num_groups > 1:
        groups = scores.unflatten(1, (num_groups, -1)).amax(-1).topk(arguments["topk_group"]).indices
        kept = torch.zeros(17, num_groups).scatter(1, groups, 1).repeat_interleave(NUM_EXPERTS // num_groups, 1)
        scores = scores * kept
    weights, ids = scores.topk(TOP_K)
    weights = factor * weights / weights.sum(-1, keepdim=True)
    expected = by_hand(made.routed_experts.w13_weight, made.routed_experts.w2_weight, x, weights, ids)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_bound_experts_weigh_their_input_where_the_model_does(layer):
    made = layer(top_k=1, renormalize=False, apply_router_weight_on_input=True)
    assert not bound_experts.bind(torch.nn.ModuleList([made]))
    x, logits = torch.randn(17, HIDDEN_SIZE), torch.randn(17, NUM_EXPERTS)
    _, found = made._apply_quant_method(x, logits, None)
    weights, ids = logits.double().softmax(-1).topk(1)
    w13, w2 = made.routed_experts.w13_weight, made.routed_experts.w2_weight
    expected = by_hand(w13, w2, x * weights, torch.ones_like(weights), ids)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"swiglu_alpha": 1.7}, r"this activation \(.* silu of experts takes no alpha\)"),
        ({"activation": "swigluoai_uninterleave"}, r"this activation \(.* needs a limit\)"),
        (
            {"scoring_func": "sqrtsoftplus", "e_score_correction_bias": torch.zeros(NUM_EXPERTS)},
            "the scores sqrtsoftplus",
        ),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_experts_that_are_not_served_are_refused_before_they_have_weights(arguments, reason, layer, monkeypatch):
    monkeypatch.setattr(RoutedExperts, "_get_quant_method", RoutedExperts._get_quant_method)  # set back afterwards
    expert_loading.refuse_unserved_experts()
    create = Mock()
    monkeypatch.setattr(UnquantizedFusedMoEMethod, "create_weights", create)
    said = rf"vllm-opset on .* does not support {reason} in layers\.0.*: choose another model"
    with pytest.raises(Refusal, match=said):
        layer(**arguments)
    create.assert_not_called()
