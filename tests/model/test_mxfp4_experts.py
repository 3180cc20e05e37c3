"""The method of gpt-oss's experts, without an engine."""

from types import SimpleNamespace

import pytest
import torch

from vllm_opset.model.mxfp4_experts import OpsetMxfp4ExpertsMethod, checked
from vllm_opset.unsupported import Refusal


@pytest.mark.parametrize("sizes", [(96, 48), (80, 64)])
def test_rows_that_are_no_whole_groups_are_refused_before_they_are_loaded(sizes):
    """Two workers would share the 96 columns of the second product as 48 each, one and a half groups of a scale."""
    method = object.__new__(OpsetMxfp4ExpertsMethod)
    method.moe = SimpleNamespace(has_bias=True, w13_num_shards=2)
    with pytest.raises(Refusal, match="no multiple of 32: give a smaller --tensor-parallel-size, or"):
        method.create_weights(torch.nn.Module(), 4, *sizes, params_dtype=torch.float32)


@pytest.fixture
def model() -> torch.nn.Module:
    """Its layer has the experts of one of two workers, which has half of the 64 columns of the second weight."""
    method = object.__new__(OpsetMxfp4ExpertsMethod)
    method.moe = SimpleNamespace(intermediate_size=64)
    method.hidden_size, method.intermediate_size = 96, 32
    layer = torch.nn.Module()
    layer.quant_method, layer.layer_name, layer.global_num_experts = method, "model.mlp.experts", 8
    experts = torch.nn.ModuleDict({"routed_experts": layer})
    return torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": experts})})


FITTING = {
    "mlp.experts.w13_weight": (8, 128, 3, 16),
    "mlp.experts.w2_weight": (8, 96, 32),
    "mlp.experts.w13_weight_scale": (8, 128, 3),
    "mlp.experts.routed_experts.w2_weight_scale": (8, 96, 2),
    "mlp.experts.w13_bias": (8, 128),
    "mlp.experts.w2_bias": (8, 96),
    "mlp.experts.7.w2_weight": (96, 2, 16),
    "mlp.experts.7.w13_bias": (128,),
    "mlp.router.weight": (3,),
}


def test_tensors_have_the_experts_and_columns_of_all_workers(model):
    weights = [(name, torch.zeros(shape)) for name, shape in FITTING.items()]
    assert [*checked(model, weights)] == weights


@pytest.mark.parametrize("name", [name for name in FITTING if "experts" in name])
def test_a_tensor_with_the_sizes_of_one_worker_is_named(name, model):
    shape = FITTING[name]
    for dimension, size in enumerate(shape):
        half = torch.zeros(*shape[:dimension], size // 2, *shape[dimension + 1 :])
        said = rf"model\.mlp\.experts\.{name.rpartition('.')[2]} \(\w+ in the checkpoint\).* cannot be loaded"
        with pytest.raises(ValueError, match=said):
            [*checked(model, [(name, half)])]
