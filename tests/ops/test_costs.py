"""The costs of ops whose work depends on what their tensors hold, counted by hand."""

import pytest
import torch

from vllm_opset import ops
from vllm_opset.ops.contract import Cost
from vllm_opset.ops.schemes import FP8, INT8

INT, LONG, FLOAT = 4, 8, 4


def ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_experts_are_read_once_if_they_are_chosen_here():
    """Choices: twice of expert 0, one of expert 2, one of an expert elsewhere."""
    x, w1, w2 = torch.ones(2, 8), torch.ones(4, 12, 8), torch.ones(4, 8, 6)
    topk_ids, expert_map = ids([0, 2], [0, 4]), torch.tensor([0, 1, 2, 3, -1], dtype=torch.int32)
    cost = ops.fused_experts.cost_of(x, w1, w2, torch.ones(2, 2), topk_ids, expert_map=expert_map)
    given = 2 * 8 * FLOAT + 2 * 2 * (FLOAT + INT) + 5 * INT
    assert cost == Cost(bytes=given + 2 * (96 + 48) * FLOAT + 2 * 8 * FLOAT, flops=2 * 3 * (96 + 48))

    sorted_token_ids, expert_ids = ops.permute(topk_ids, 4, 2, expert_map)
    cost = ops.grouped_gemm.cost_of(x, w1, sorted_token_ids, expert_ids, 2)
    given = 2 * 8 * FLOAT + (len(sorted_token_ids) + len(expert_ids)) * INT
    assert cost == Cost(bytes=given + 2 * 96 * FLOAT + 4 * 12 * FLOAT, flops=2 * 3 * 96)


@pytest.mark.parametrize("contract", [ops.linear, ops.grouped_gemm, ops.fused_experts], ids=lambda one: one.name)
def test_the_factors_of_products_are_of_the_dtype_to_which_activations_are_quantised(contract):
    found = set()
    for args, kwargs in (sample.make() for sample in contract.samples("cpu", torch.bfloat16)):
        activation = contract.problem_for(*args, **kwargs).scheme.activation
        factors = contract.cost_of(*args, **kwargs).factors
        assert factors is (None if activation is None else activation.dtype)
        found.add(factors)
    assert found == {None, FP8, INT8}


def test_penalties_change_the_logits_of_tokens_that_occur():
    """Tokens 1 and 2 in the prompt, 2 and 3 in the output, and the padding 5."""
    prompt, output, penalties = torch.tensor([[1, 2, 1, 5]]), torch.tensor([[2, 2, 3, 5, 5]]), [torch.ones(1)] * 3
    cost = ops.apply_penalties.cost_of(torch.zeros(1, 5), prompt, output, *penalties)
    assert cost == Cost(bytes=9 * LONG + 3 * FLOAT + 2 * 3 * FLOAT, flops=5 * 3)


def test_a_page_is_read_once_for_all_tokens_on_it():
    """A request with tokens on two pages, and one whose token is on its own first page."""
    starts, positions = torch.tensor([0, 5, 6], dtype=torch.int32), torch.tensor([2, 3, 4, 5, 6, 0])
    table, slots = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(6, dtype=torch.int64)
    cost = ops.compute_slot_mapping.cost_of(starts, positions, table, 4, slots)
    assert cost == Cost(bytes=3 * INT + 6 * LONG + 3 * INT + 6 * LONG, flops=0)
