"""Experts of a loaded model that get opset's method, and those that keep vLLM's."""

import re
import types
from collections.abc import Callable

import pytest
import torch
from expert_layers import BLOCK, HIDDEN_SIZE, NUM_EXPERTS, TOP_K, FusedMoE, assert_computes, by_hand
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.int8 import Int8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import RoutingSimulatorRouter
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_int8,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.v1.worker.gpu_worker import Worker

from vllm_opset import ops, selection
from vllm_opset.model import bound_experts, experts
from vllm_opset.model.fp8_linear import scaled_fp8_quant
from vllm_opset.model.quantised_experts import OpsetQuantisedExperts
from vllm_opset.platform.packing import PackingWorker

pytestmark = [pytest.mark.window, pytest.mark.usefixtures("alone")]


@pytest.mark.parametrize("num_tokens", [1, 17])
@pytest.mark.parametrize("renormalize", [False, True])
def test_bound_experts_compute_what_the_formula_says(num_tokens, renormalize, layer):
    made = layer(renormalize=renormalize)
    kernel = made._quant_method.moe_kernel
    assert not bound_experts.bind(torch.nn.ModuleList([made]))
    assert type(made._quant_method) is bound_experts.BoundExpertsMethod and made.is_monolithic
    assert made._quant_method.moe_kernel is kernel
    x, logits = torch.randn(num_tokens, HIDDEN_SIZE), torch.randn(num_tokens, NUM_EXPERTS)
    shared, found = made._apply_quant_method(x, logits, None)
    weights, ids = logits.double().softmax(-1).topk(TOP_K)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    assert shared is None
    layer = made.routed_experts
    expected = by_hand(layer.w13_weight, layer.w2_weight, x, weights, ids)
    tolerance = ops.fused_experts.tolerances[torch.float32]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance.rtol, atol=tolerance.atol)


def test_weights_that_vllm_loads_again_are_used(layer):
    made = layer()
    bound_experts.bind(torch.nn.ModuleList([made]))
    x, logits = torch.randn(5, HIDDEN_SIZE), torch.randn(5, NUM_EXPERTS)
    before = made._apply_quant_method(x, logits, None)[1].clone()
    made.routed_experts.w2_weight.data.mul_(2)
    torch.testing.assert_close(made._apply_quant_method(x, logits, None)[1], 2 * before)


def test_a_map_that_names_no_expert_is_refused_by_the_name_of_the_layer(layer):
    made = layer().routed_experts
    made._expert_map = torch.full((NUM_EXPERTS,), -1, dtype=torch.int32)
    with pytest.raises(ValueError, match=re.escape(f"{made.layer_name}.expert_map names no expert")):
        experts.Experts(made, made.moe_config)


def test_the_warm_up_reaches_bound_experts(layer, monkeypatch):
    made = layer()
    model = torch.nn.ModuleList([made])
    bound_experts.bind(model)
    sizes = []
    monkeypatch.setattr(experts.Experts, "__call__", lambda self, x, logits: sizes.append(len(x)))
    experts.multiply(model, 10)
    assert sizes == [1, 2, 4, 8, 10]


def random_of(name: str, like: torch.Tensor) -> torch.Tensor:
    """Random values of a parameter of this name. Scales are positive."""
    values = torch.randn(like.shape)
    return (values.abs() if "scale" in name else values).to(like.dtype)


@pytest.fixture
def fp8_layer(monkeypatch) -> Callable[..., MoERunner]:
    """`fp8_layer(block)`: experts with fp8 weights by vLLM's method, as on a GPU where its Triton kernels compute them.

    block: the sizes of the blocks that share a scale, or None for a scale per expert.
    """
    monkeypatch.setattr(fp8, "select_fp8_moe_backend", lambda *_, **__: (Fp8MoeBackend.TRITON, OpsetQuantisedExperts))
    monkeypatch.setattr("vllm._custom_ops.scaled_fp8_quant", scaled_fp8_quant)
    numbers = iter(range(100))

    def layer(block: list[int] | None) -> MoERunner:
        config = fp8.Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=block)
        sizes = {"num_experts": 4, "top_k": 2, "hidden_size": BLOCK, "intermediate_size": BLOCK}
        made = FusedMoE(**sizes, prefix=f"fp8.{next(numbers)}", params_dtype=torch.bfloat16, quant_config=config)
        for name, parameter in made.routed_experts.named_parameters():
            parameter.data.copy_(random_of(name, parameter))
            parameter.weight_loader = default_weight_loader  # of whole parameters
        record_metadata_for_reloading(made)
        method = made.routed_experts.quant_method
        method.process_weights_after_loading(made.routed_experts)
        method.moe_kernel = None  # vLLM's own, which needs a GPU
        return made

    return layer


def dequantised(layer: torch.nn.Module, weight: str) -> torch.Tensor:
    """A weight of experts, with a scale for each expert or for each block of one."""
    stored = getattr(layer, f"{weight}_weight").float()
    if hasattr(layer, f"{weight}_weight_scale_inv"):
        scale = getattr(layer, f"{weight}_weight_scale_inv").repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
        return stored * scale
    return stored * getattr(layer, f"{weight}_weight_scale").view(-1, 1, 1)


SCALES = pytest.mark.parametrize("block", [[BLOCK, BLOCK], None], ids=["blocks", "per tensor"])


@SCALES
def test_bound_experts_with_fp8_weights_compute_what_the_formula_says(block, fp8_layer):
    made = fp8_layer(block)
    w13, w2 = (dequantised(made.routed_experts, weight) for weight in ("w13", "w2"))
    assert not bound_experts.bind(torch.nn.ModuleList([made]))
    assert type(made._quant_method) is fp8.Fp8MoEMethod and made.is_monolithic
    assert_computes(made, w13, w2)


def load_again(layer: torch.nn.Module) -> None:
    model = torch.nn.ModuleList([layer])
    initialize_layerwise_reload(model)
    for name, parameter in list(layer.routed_experts.named_parameters()):
        parameter.weight_loader(parameter, random_of(name, parameter))
    finalize_layerwise_reload(model, None)


# From a file, and from a trainer.
@pytest.mark.parametrize("reload", ["reload_weights", "finish_weight_update"])
@SCALES
def test_fp8_weights_that_vllm_loads_again_get_the_memory_of_those_before(reload, block, fp8_layer, monkeypatch):
    """vLLM's method makes a new kernel then. CUDA graphs that were captured before read the old memory.

    The reference reads weights as they are, as kernels for a GPU do.
    """
    selection.configure({"opset": {"kernels": {"fused_experts": "reference"}}})
    made = fp8_layer(block)
    model, layer = torch.nn.ModuleList([made]), made.routed_experts
    bound_experts.bind(model)
    kernel, read = made._quant_method.moe_kernel, read_by(layer)
    monkeypatch.setattr(Worker, reload, lambda self: load_again(made), raising=False)
    worker = PackingWorker.__new__(PackingWorker)
    worker.model_runner = types.SimpleNamespace(get_model=lambda: model)
    worker.model_config = types.SimpleNamespace(is_moe=True, quantization="fp8", architectures=["Qwen3MoeForCausalLM"])
    getattr(worker, reload)()
    assert made._quant_method.moe_kernel is not kernel and read_by(layer) == read
    assert_computes(made, dequantised(layer, "w13"), dequantised(layer, "w2"))


def test_bound_experts_with_int8_weights_compute_what_the_formula_says(monkeypatch):
    """With scales per channel, as llm-compressor stores W8A8."""
    found = Int8MoeBackend.TRITON, OpsetQuantisedExperts
    monkeypatch.setattr(compressed_tensors_moe_w8a8_int8, "select_int8_moe_backend", lambda **_: found)
    bits = {"num_bits": 8, "type": "int", "symmetric": True}
    of_weight, of_input = bits | {"strategy": "channel"}, bits | {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": of_weight, "input_activations": of_input}
    config = {"format": "int-quantized", "ignore": [], "config_groups": {"group_0": group}}
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": BLOCK, "intermediate_size": BLOCK}
    how = {"params_dtype": torch.bfloat16, "quant_config": CompressedTensorsConfig.from_config(config)}
    made = FusedMoE(**sizes, prefix="int8.0", **how)
    layer = made.routed_experts
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(
            random_of(name, parameter) if "scale" in name else torch.randint(-128, 128, parameter.shape)
        )
    made._quant_method.process_weights_after_loading(layer)
    made._quant_method.moe_kernel = None  # vLLM's own, which needs a GPU
    w13, w2 = (
        getattr(layer, f"{name}_weight").float() * getattr(layer, f"{name}_weight_scale") for name in ("w13", "w2")
    )
    assert not bound_experts.bind(torch.nn.ModuleList([made])) and made.is_monolithic
    assert_computes(made, w13, w2)


def read_by(layer: torch.nn.Module) -> list[int]:
    """The addresses of the weights and scales that the kernel of a layer's experts reads."""
    found = experts.experts_of(layer)
    scales = (found._arguments[name] for name in ("w1_scale", "w2_scale"))
    return [tensor.data_ptr() for tensor in (*found._weights(), *scales)]


def test_experts_with_fp8_weights_for_another_kernel_keep_vllms(fp8_layer):
    made = fp8_layer(None)
    made._quant_method.fp8_backend = Fp8MoeBackend.DEEPGEMM
    assert list(bound_experts.bind(torch.nn.ModuleList([made]))) == ["weights that are stored for DEEPGEMM"]


def _of_another_method(made: MoERunner) -> None:
    made._quant_method.__class__ = type("Fp8MoEMethod", (UnquantizedFusedMoEMethod,), {})


def _of_another_runner(made: MoERunner) -> None:
    made.__class__ = type("LatentMoERunner", (MoERunner,), {})


def _stored_for_another_kernel(made: MoERunner) -> None:
    made._quant_method.unquantized_backend = UnquantizedMoeBackend.FLASHINFER_CUTLASS


def _routed_by_token_ids(made: MoERunner) -> None:
    made.router._hash_indices_table = torch.zeros(10, TOP_K, dtype=torch.int32)


def _simulated(made: MoERunner) -> None:
    made.router = RoutingSimulatorRouter.__new__(RoutingSimulatorRouter)


def _of_unknown_scores(made: MoERunner) -> None:
    made.routed_experts.scoring_func = "cosine"


def _of_an_unknown_activation(made: MoERunner) -> None:
    made.routed_experts.activation = types.SimpleNamespace(value="swish_cubed")


def _standing_in_for_others(made: MoERunner) -> None:
    made.routed_experts.moe_config.require_decomposed_backend = True


KEEP = {
    "experts that stand in for others": _standing_in_for_others,
    "the weights of Fp8MoEMethod": _of_another_method,
    "the model's own LatentMoERunner": _of_another_runner,
    "weights that are stored for FlashInfer CUTLASS": _stored_for_another_kernel,
    "this choice of experts (FusedTopKRouter)": _routed_by_token_ids,
    "this choice of experts (RoutingSimulatorRouter)": _simulated,
    "the scores cosine": _of_unknown_scores,
    "this activation (": _of_an_unknown_activation,
}


@pytest.mark.parametrize(("reason", "change"), KEEP.items(), ids=[change.__name__ for change in KEEP.values()])
def test_what_opset_does_not_serve_keeps_vllms_method(reason, change, layer):
    made, other = layer(), layer()
    change(made)
    method = made._quant_method
    ((found, layers),) = bound_experts.bind(torch.nn.ModuleList([made, other])).items()
    assert found.startswith(reason) and layers == 1
    assert made._quant_method is method
    assert type(other._quant_method) is bound_experts.BoundExpertsMethod
