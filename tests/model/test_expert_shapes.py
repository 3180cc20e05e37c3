"""The shape of an expert's tensor in the checkpoint follows from the part of it that a tensor-parallel worker has."""

from types import SimpleNamespace

import pytest
import torch

from vllm_opset.model.expert_shapes import check_shape

TRANSPOSED, PER_CHANNEL, BY_GROUPS = {"is_transposed": True}, {"quant_method": "channel"}, {"quant_method": "group"}
BY_BLOCKS = {"quant_method": "block"}
# Two workers share 384 outputs of the first weight, and inputs of the second one. Hidden states have 128 columns.
CASES = [
    ("w13_weight", (4, 384, 128), {}, "w1", (384, 128)),
    ("w2_weight", (4, 128, 192), {}, "w2", (128, 384)),
    ("w13_weight_scale", (4, 384, 1), PER_CHANNEL, "w3", (384, 1)),
    ("w2_weight_scale", (4, 128, 1), PER_CHANNEL, "w2", (128, 1)),
    (
        "w13_weight_scale_inv",
        (4, 6, 2),
        BY_BLOCKS,
        "w1",
        (3, 1),
    ),  # vLLM halves the blocks, so that workers have whole ones
    ("w2_weight_scale_inv", (4, 2, 3), BY_BLOCKS, "w2", (1, 3)),
    ("w13_qweight", (4, 128, 48), TRANSPOSED | BY_GROUPS, "w3", (128, 48)),
    ("w2_qzeros", (4, 6, 16), TRANSPOSED | BY_GROUPS, "w2", (12, 16)),
    ("w2_scales", (4, 1, 128), TRANSPOSED | PER_CHANNEL, "w2", (1, 128)),
    ("w2_weight_packed", (4, 128, 24), PER_CHANNEL, "w2", (128, 48)),
    ("w13_bias", (4, 384), TRANSPOSED, "w1", (384,)),
    ("w2_bias", (4, 128), TRANSPOSED, "w2", (128,)),
]


def check(name, of_worker, attributes, shard, stored, is_act_and_mul=True) -> None:
    moe = SimpleNamespace(is_act_and_mul=is_act_and_mul, intermediate_size=384, intermediate_size_per_partition=192)
    layer = SimpleNamespace(moe_config=moe, quant_method=SimpleNamespace(weight_scale_refine=(2, 2)))
    parameter = torch.zeros(of_worker)
    vars(parameter).update(attributes)
    check_shape(layer, name, parameter, torch.zeros(stored), shard)


@pytest.mark.parametrize(("name", "of_worker", "attributes", "shard", "whole"), CASES)
def test_the_whole_of_an_expert_passes_and_nothing_else_does(name, of_worker, attributes, shard, whole):
    check(name, of_worker, attributes, shard, whole)
    for dimension, size in enumerate(whole):
        for other in {size // 2, size + 1, 2 * size} - {size}:
            with pytest.raises(ValueError, match=r"config\.json asks for "):
                check(name, of_worker, attributes, shard, [*whole[:dimension], other, *whole[dimension + 1 :]])
    with pytest.raises(ValueError, match=r"config\.json asks for "):
        check(name, of_worker, attributes, shard, ())


def test_one_tensor_may_hold_all_experts_of_a_worker():
    check("w2_weight", (4, 128, 192), {}, "w2", (4, 128, 384))
    with pytest.raises(ValueError, match=r"asks for \[4, 128, 384\]"):
        check("w2_weight", (4, 128, 192), {}, "w2", (3, 128, 384))


def test_a_first_weight_without_a_gate_is_one_half():
    check("w13_weight", (4, 192, 128), {}, "w1", (384, 128), is_act_and_mul=False)


def test_one_scale_of_a_weight_is_left_to_vllm():
    for stored in ((), (1,), (2,)):
        check("w13_weight_scale", (4, 2), {"quant_method": "tensor"}, "w1", stored)
        check("w2_input_scale", (4,), {}, "w2", stored)
