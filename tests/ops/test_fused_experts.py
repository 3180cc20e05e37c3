"""fused_experts beside the ops that it is composed of, and the check of its expert map."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_opset import ops
from vllm_opset.kernel import kernels_of
from vllm_opset.ops import _samples
from vllm_opset.ops.moe.fused_experts import check_expert_map

HIDDEN_SIZE, WIDTH = 8, 6
ANY_CHOICES = settings(deadline=None, max_examples=40, derandomize=True)
BY_KERNEL = pytest.mark.parametrize("name", ["reference", "cpu"])
# Sums of a few products of order 1, in fp32 and in another order.
CLOSE = {"rtol": 1e-5, "atol": 2e-5}


def test_a_map_that_names_no_expert_is_refused_by_the_name_of_the_tensor():
    with pytest.raises(ValueError, match=r"layers\.3\.expert_map names no expert: all of its 8 entries are -1"):
        check_expert_map(torch.full((8,), -1, dtype=torch.int32), 4, "layers.3.expert_map")


def test_a_map_that_names_experts_without_weights_is_refused():
    with pytest.raises(ValueError, match="expert_map names experts from 0 to 4, and there are 4"):
        check_expert_map(torch.tensor([0, -1, 4]), 4)
    check_expert_map(torch.tensor([0, -1, 3]), 4)


def test_it_is_the_composition_of_the_other_ops():
    """In fp64, for one sample with all that the ops have in common."""
    (sample,) = (s for s in ops.fused_experts.samples("cpu", torch.float64) if s.name == "gpt-oss")
    (x, w1, w2, weights, ids), how = sample.make()
    # Here the weights of experts without tokens are NaN, and linear sums over them in no op.
    order = ops.permute(ids, len(w1), 16)
    middle = ops.swigluoai_and_mul(ops.grouped_gemm(x, w1, *order, ids.shape[1], how["w1_bias"]))
    results = ops.grouped_gemm(middle, w2, *order, 1, how["w2_bias"])
    together = ops.combine(results.view(*ids.shape, -1), weights)
    torch.testing.assert_close(together, ops.fused_experts(x, w1, w2, weights, ids, **how), rtol=1e-6, atol=1e-6)


class Choices(NamedTuple):
    """ids: as `permute` takes them. here: the number of experts that are here. places: of each choice's, by hand."""

    ids: torch.Tensor
    here: int
    expert_map: torch.Tensor | None
    places: list[int]


@st.composite
def choices(draw) -> Choices:
    """Any experts of up to 12 tokens, −1 and the same one twice included, and any map or none."""
    num_experts, top_k = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    expert_map, here = list(range(num_experts)), num_experts
    if is_mapped := draw(st.booleans()):
        here = draw(st.integers(1, num_experts))
        expert_map = draw(st.permutations([*range(here), *[-1] * (num_experts - here)]))
    row = st.lists(st.integers(-1, num_experts - 1), min_size=top_k, max_size=top_k)
    rows = draw(st.lists(row, max_size=12))
    return Choices(
        torch.tensor(rows, dtype=torch.int32).view(len(rows), top_k),
        here,
        torch.tensor(expert_map, dtype=torch.int32) if is_mapped else None,
        [-1 if expert < 0 else expert_map[expert] for row in rows for expert in row],
    )


def arguments(chosen: Choices) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random x, w1, w2 and weights of the choices. Tokens without an expert that is here are NaN."""
    rng = _samples.generator("any choices")
    x, w1, w2 = (
        torch.randn(shape, generator=rng)
        for shape in (
            (len(chosen.ids), HIDDEN_SIZE), (chosen.here, 2 * WIDTH, HIDDEN_SIZE), (chosen.here, HIDDEN_SIZE, WIDTH)
        )
    )  # fmt: skip
    x[(torch.tensor(chosen.places).view(chosen.ids.shape) < 0).all(dim=1)] = torch.nan
    return x, w1 * HIDDEN_SIZE**-0.5, w2 * WIDTH**-0.5, torch.rand(chosen.ids.shape, generator=rng)


@given(chosen=choices(), block_size=st.integers(1, 8))
@ANY_CHOICES
def test_each_choice_of_an_expert_that_is_here_has_one_place_in_the_fewest_blocks_of_it(chosen, block_size):
    sorted_token_ids, expert_ids = ops.permute(chosen.ids, chosen.here, block_size, chosen.expert_map)
    experts = expert_ids.repeat_interleave(block_size).tolist()
    placed = [pair for pair in zip(sorted_token_ids.tolist(), experts, strict=True) if pair[0] < chosen.ids.numel()]
    assert sorted(placed) == [(choice, place) for choice, place in enumerate(chosen.places) if place >= 0]
    for expert in range(chosen.here):
        assert expert_ids.tolist().count(expert) == math.ceil(chosen.places.count(expert) / block_size)


@BY_KERNEL
@given(chosen=choices(), block_size=st.integers(1, 8))
@ANY_CHOICES
def test_any_choices_are_served_as_by_the_composition_of_the_other_ops(name, chosen, block_size):
    ids, here, expert_map, _ = chosen
    x, w1, w2, weights = arguments(chosen)
    order = ops.permute(ids, here, block_size, expert_map)
    middle = ops.silu_and_mul(ops.grouped_gemm(x, w1, *order, ids.shape[1]))
    results = ops.grouped_gemm(middle, w2, *order, 1).view(*ids.shape, HIDDEN_SIZE)
    together = ops.combine(results, weights, topk_ids=ids, expert_map=expert_map)
    found = kernels_of("fused_experts")[name].run(x, w1, w2, weights, ids, expert_map=expert_map)
    torch.testing.assert_close(found, together, **CLOSE)


@BY_KERNEL
@given(chosen=choices(), data=st.data())
@ANY_CHOICES
def test_the_order_of_the_experts_changes_nothing(name, chosen, data):
    """Without a map, the ids name the experts in their new order, and otherwise the map does."""
    ids, here, expert_map, _ = chosen
    x, w1, w2, weights = arguments(chosen)
    new_order = torch.tensor(data.draw(st.permutations(range(here))))

    def renamed(experts: torch.Tensor) -> torch.Tensor:
        return torch.where(experts < 0, experts, new_order.argsort().int()[experts.clamp(min=0).long()])

    run = kernels_of("fused_experts")[name].run
    expected = run(x, w1, w2, weights, ids, expert_map=expert_map)
    if expert_map is None:
        ids = renamed(ids)
    else:
        expert_map = renamed(expert_map)
    found = run(x, w1[new_order], w2[new_order], weights, ids, expert_map=expert_map)
    torch.testing.assert_close(found, expected, **CLOSE)
