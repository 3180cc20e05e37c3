"""The tensors of gpt-oss's experts have the shapes of config.json, in the checkpoint of all workers."""

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts

from vllm_opset.model.gpt_oss_shapes import checked
from vllm_opset.model.mxfp4_experts import OpsetMxfp4ExpertsMethod

OF_MXFP4 = {
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
UNQUANTISED = {
    "mlp.experts.w13_weight": (8, 96, 128),
    "mlp.experts.routed_experts.w2_weight": (8, 64, 96),
    "mlp.experts.w13_bias": (8, 128),
    "mlp.experts.w2_bias": (8, 96),
    "mlp.experts.7.w13_weight": (96, 128),
    "mlp.experts.7.w2_bias": (96,),
    "mlp.router.weight": (3,),
}
MXFP4 = {"quant_method": "mxfp4"}
FORMATS = [(OpsetMxfp4ExpertsMethod, MXFP4, OF_MXFP4), (object, None, UNQUANTISED)]


def model(method: type, quantisation: dict | None) -> torch.nn.Module:
    """Its layer has the experts of one of two workers, which has half of the 64 columns of the second weight."""
    layer = object.__new__(RoutedExperts)
    torch.nn.Module.__init__(layer)
    layer.quant_method, layer.layer_name, layer.global_num_experts = object.__new__(method), "model.mlp.experts", 8
    layer.moe_config = SimpleNamespace(intermediate_size=64, hidden_dim_unpadded=96)
    experts = torch.nn.ModuleDict({"routed_experts": layer})
    made = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": experts})})
    made.config = SimpleNamespace() if quantisation is None else SimpleNamespace(quantization_config=quantisation)
    return made


@pytest.mark.parametrize(("method", "quantisation", "fitting"), FORMATS, ids=["mxfp4", "unquantised"])
def test_tensors_have_the_experts_and_columns_of_all_workers(method, quantisation, fitting):
    weights = [(name, torch.zeros(shape)) for name, shape in fitting.items()]
    assert [*checked(model(method, quantisation), weights)] == weights


@pytest.mark.parametrize(
    ("method", "quantisation", "name", "shape"),
    [
        (method, quantisation, *one)
        for method, quantisation, fitting in FORMATS
        for one in fitting.items()
        if "experts" in one[0]
    ],
)
def test_a_tensor_of_another_size_is_named(method, quantisation, name, shape):
    made = model(method, quantisation)
    stored = r"\w+_blocks|\w+" if quantisation else r"\w+_proj(_bias)?"
    said = rf"model\.mlp\.experts\.{name.rpartition('.')[2]} \(({stored}) in the checkpoint\).* cannot be loaded"
    for dimension, size in enumerate(shape):
        for other in (size // 2, 2 * size):
            tensor = torch.zeros(*shape[:dimension], other, *shape[dimension + 1 :])
            with pytest.raises(ValueError, match=said):
                [*checked(made, [(name, tensor)])]


def test_formats_that_opset_does_not_serve_are_left_to_vllm():
    weights = [("mlp.experts.w13_weight", torch.zeros(7, 7, 7))]
    assert [*checked(model(object, MXFP4), weights)] == weights
