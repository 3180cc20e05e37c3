"""The shape of an expert's tensor in the checkpoint follows from the part of it that a tensor-parallel worker has."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from expert_layers import BLOCK, FusedMoE
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.quantization import fp8

from vllm_opset.model.expert_shapes import check_shape, checked
from vllm_opset.model.experts import MonolithicMethod
from vllm_opset.model.loading import Misfit
from vllm_opset.model.quantised_experts import OpsetQuantisedExperts

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


# vLLM's kernels may ask for more columns of hidden states, and more rows of each worker's half.
PADDED = {"hidden_dim": 256, "intermediate_size_per_partition": 256}
PADDED_CASES = [
    ("w13_weight", (4, 512, 256), {}, "w3", (384, 128)),
    ("w2_weight", (4, 256, 256), {}, "w2", (128, 384)),
    ("w13_weight_scale", (4, 512, 1), PER_CHANNEL, "w1", (384, 1)),
    ("w2_weight_scale", (4, 256, 1), PER_CHANNEL, "w2", (128, 1)),
    ("w2_weight_scale_inv", (4, 4, 4), BY_BLOCKS, "w2", (1, 3)),
    ("w13_bias", (4, 512), {}, "w1", (384,)),
    ("w2_bias", (4, 256), {}, "w2", (128,)),
]


class Quantised(MonolithicMethod):
    weight_scale_refine = (2, 2)


class OfVllm:
    """Such as the method that quantises bf16 weights to fp8 while it loads them."""


def _check(name, of_worker, attributes, shard, stored, method: type = Quantised, **changes) -> None:
    moe = {"is_act_and_mul": True, "tp_size": 2, "hidden_dim": 128, "hidden_dim_unpadded": 128}
    moe |= {"intermediate_size_per_partition": 192, "intermediate_size_per_partition_unpadded": 192}
    layer = SimpleNamespace(moe_config=SimpleNamespace(**moe | changes), quant_method=method())
    parameter = torch.zeros(of_worker)
    vars(parameter).update(attributes)
    check_shape(layer, name, parameter, torch.zeros(stored), shard)


@pytest.mark.parametrize(
    ("name", "of_worker", "attributes", "shard", "whole", "changes"),
    [*((*case, {}) for case in CASES), *((*case, PADDED) for case in PADDED_CASES)],
)
def test_the_whole_of_an_expert_passes_and_nothing_else_does(name, of_worker, attributes, shard, whole, changes):
    check = partial(_check, **changes)
    check(name, of_worker, attributes, shard, whole)
    for dimension, size in enumerate(whole):
        for other in {size // 2, size + 1, 2 * size} - {size}:
            with pytest.raises(ValueError, match=r"config\.json asks for "):
                check(name, of_worker, attributes, shard, [*whole[:dimension], other, *whole[dimension + 1 :]])
    with pytest.raises(ValueError, match=r"config\.json asks for "):
        check(name, of_worker, attributes, shard, ())


def test_one_tensor_may_hold_all_experts_of_a_worker():
    _check("w2_weight", (4, 128, 192), {}, "w2", (4, 128, 384))
    with pytest.raises(ValueError, match=r"asks for \[4, 128, 384\]"):
        _check("w2_weight", (4, 128, 192), {}, "w2", (3, 128, 384))


def test_a_first_weight_without_a_gate_is_one_half():
    _check("w13_weight", (4, 192, 128), {}, "w1", (384, 128), is_act_and_mul=False)


@pytest.mark.parametrize(("name", "of_worker", "shard", "whole"), [
    ("w13_weight", (4, 384, 128), "w1", (384, 128)),
    ("w2_weight", (4, 128, 192), "w2", (128, 384)),
    ("w13_bias", (4, 384), "w3", (384,)),
    ("w2_bias", (4, 128), "w2", (128,)),
])  # fmt: skip
def test_a_weight_that_is_stored_as_it_is_is_checked_for_every_method(name, of_worker, shard, whole):
    _check(name, of_worker, {}, shard, whole, OfVllm)
    with pytest.raises(ValueError, match=r"config\.json asks for "):
        _check(name, of_worker, {}, shard, (whole[0] // 2, *whole[1:]), OfVllm)


@pytest.mark.parametrize(("name", "of_worker", "attributes"), [
    ("w13_weight", (4, 384, 64), {}),  # two values in a byte
    ("w13_weight", (4, 24576, 1), {}),  # as bitsandbytes has it
    ("w13_weight_scale", (4, 384, 4), BY_BLOCKS),
])  # fmt: skip
def test_what_opset_does_not_know_is_left_to_vllm(name, of_worker, attributes):
    _check(name, of_worker, attributes, "w1", (7, 7), OfVllm)


def test_one_scale_of_a_weight_is_left_to_vllm():
    for stored in ((), (1,), (2,)):
        _check("w13_weight_scale", (4, 2), {"quant_method": "tensor"}, "w1", stored)
        _check("w2_input_scale", (4,), {}, "w2", stored)


@pytest.mark.window
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("config", "name", "shape"),
    [
        (None, "weight", (2 * BLOCK, BLOCK)),
        (fp8.Fp8Config(True, weight_block_size=[BLOCK, BLOCK]), "weight", (2 * BLOCK, BLOCK)),
        (fp8.Fp8Config(True, weight_block_size=[BLOCK, BLOCK]), "weight_scale_inv", (2, 1)),
        (fp8.Fp8Config(), "weight", (2 * BLOCK, BLOCK)),
    ],
    ids=["unquantised", "fp8 by blocks", "scales by blocks", "quantised while it is loaded"],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_layers_with_methods_of_vllm_name_a_tensor_of_another_size(config, name, shape, transposed, monkeypatch):
    """As on vLLM's own wheel, whose layers are built before opset's kernels compute them."""
    monkeypatch.setattr(RoutedExperts, "weight_loader", checked(RoutedExperts.weight_loader))
    monkeypatch.setattr(fp8, "select_fp8_moe_backend", lambda *_, **__: (Fp8MoeBackend.TRITON, OpsetQuantisedExperts))
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": BLOCK, "intermediate_size": 2 * BLOCK}
    prefix = f"{config and vars(config)} {name} {transposed}"
    layer = FusedMoE(**sizes, prefix=prefix, params_dtype=torch.bfloat16, quant_config=config).routed_experts
    weight, shard = ("w2", "w2") if transposed else ("w13", "w3")
    parameter = getattr(layer, f"{weight}_{name}")
    whole = torch.ones(shape[::-1] if transposed else shape)

    def load(tensor: torch.Tensor) -> bool:
        own = f"layers.0.experts.{weight}_{name}"
        return parameter.weight_loader(parameter, tensor, own, shard_id=shard, expert_id=3, return_success=True)

    assert load(whole)
    for other in (whole[:1], whole.repeat(2, 1), whole.repeat(1, 2)):
        with pytest.raises(
            Misfit, match=rf"{weight}_{name} \({shard} of expert 3\) cannot be loaded: .*in all workers"
        ):
            load(other if other.shape != whole.shape else whole[:0])
