"""Experts that a bound layer chooses, and how it weighs them, where a model says otherwise than most."""

import pytest
import torch
from expert_layers import HIDDEN_SIZE, NUM_EXPERTS, TOP_K, by_hand

from vllm_opset.model import bound_experts

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
