"""Weights that are loaded again get the memory of those before, which captured CUDA graphs read."""

from types import SimpleNamespace

import pytest
import torch

from vllm_opset import selection
from vllm_opset.kernel import kernels_of
from vllm_opset.model.experts import experts_of
from vllm_opset.model.int4_experts import (
    LOADED_BIASES,
    Int4ExpertsMethod,
    OpsetAwqExpertsMethod,
    OpsetGptqExpertsMethod,
)
from vllm_opset.model.int4_linear import OpsetAwqLinearMethod
from vllm_opset.model.packed_linear import run_of
from vllm_opset.model.reloading import refilled
from vllm_opset.model.scaled_linear import ScaledLinear
from vllm_opset.ops.schemes import INT8, PER_ROW, PER_TENSOR, Quantised, Scheme

pytestmark = pytest.mark.window
GROUP, INPUTS, OUTPUTS = 32, 64, 64
GROUPS = INPUTS // GROUP


@pytest.fixture(autouse=True)
def as_on_a_gpu():
    """Selects references, because the kernels for a CPU pack weights, and those for a GPU do not."""
    selection.configure({"opset": {"kernels": {"linear": "reference", "fused_experts": "reference"}}})
    selection.forget()


def in_int32(*shape: int) -> torch.nn.Parameter:
    """Random values of 4 bits, eight in a number."""
    return torch.nn.Parameter(torch.randint(2**31, shape, dtype=torch.int32), requires_grad=False)


def scales(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.rand(shape) / 16, requires_grad=False)


def load_linear(layer: torch.nn.Module) -> None:
    layer.qweight, layer.qzeros = in_int32(INPUTS, OUTPUTS // 8), in_int32(GROUPS, OUTPUTS // 8)
    layer.scales = scales(GROUPS, OUTPUTS)


def awq() -> OpsetAwqLinearMethod:
    method = object.__new__(OpsetAwqLinearMethod)
    method._call, method._dtype, method._linear = run_of, torch.float32, None
    method.quant_config = SimpleNamespace(group_size=GROUP)
    return method


def test_int4_weights_of_a_linear_layer():
    layer, method, x = torch.nn.Module(), awq(), torch.randn(3, INPUTS)
    load_linear(layer)
    method.process_weights_after_loading(layer)
    first, at = method.apply(layer, x), addresses(method._linear._held)
    assert at.keys() == {"weight", "weight_scale", "weight_zero_point"}
    load_linear(layer)
    fresh = awq()
    for each in (fresh, method):
        stored = layer.qweight.data
        each.process_weights_after_loading(layer)
        layer.qweight.data = stored
    assert addresses(method._linear._held) == at
    assert method._linear._linear.keywords["weight_scale"].data_ptr() == at["weight_scale"]
    assert torch.equal(method.apply(layer, x), fresh.apply(layer, x))
    assert not torch.equal(method.apply(layer, x), first)


def test_int8_weights_and_a_given_scale():
    """A weight that is multiplied as it was given stays with the layer, and vLLM copies into it as well."""
    scheme = Scheme(Quantised(INT8, PER_ROW), Quantised(INT8, PER_TENSOR))

    def product(before: ScaledLinear | None = None) -> tuple[ScaledLinear, dict[str, torch.Tensor]]:
        weight = torch.randint(-127, 128, (OUTPUTS, INPUTS), dtype=INT8)
        given = {"weight": weight, "weight_scale": torch.rand(OUTPUTS, 1), "x_scale": torch.rand(1, 1)}
        made = ScaledLinear(
            run_of, weight, given["weight_scale"], scheme, torch.float32, given["x_scale"], before=before
        )
        return made, given

    first, given = product()
    assert first.needs_given and addresses(first._held) == addresses(given)
    again, loaded = product(first)
    assert again.needs_given and addresses(again._held) == addresses(given)
    assert again.x_scale is first.x_scale and again._quantise.keywords["scale"] is first.x_scale
    assert all(torch.equal(again._held[name], loaded[name]) for name in loaded)


NUM_EXPERTS = 4


def load_experts(layer: torch.nn.Module) -> None:
    for weight, outputs, inputs in (("w13", 2 * OUTPUTS, INPUTS), ("w2", INPUTS, OUTPUTS)):
        groups = inputs // GROUP
        setattr(layer, f"{weight}_qweight", in_int32(NUM_EXPERTS, inputs, outputs // 8))
        setattr(layer, f"{weight}_qzeros", in_int32(NUM_EXPERTS, groups, outputs // 8))
        setattr(layer, f"{weight}_scales", scales(NUM_EXPERTS, groups, outputs))


def experts_layer() -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.layer_name, layer.local_num_experts, layer.expert_map = "experts", NUM_EXPERTS, None
    layer.activation, layer.apply_router_weight_on_input = SimpleNamespace(value="silu"), False
    layer.moe_config = SimpleNamespace(is_act_and_mul=True)
    layer.swiglu_limit = layer.swiglu_alpha = layer.swiglu_beta = None
    layer.custom_routing_function, layer.use_grouped_topk = None, False
    layer.top_k, layer.global_num_experts, layer.num_expert_group = 2, NUM_EXPERTS, None
    layer.scoring_func, layer.renormalize, layer.routed_scaling_factor = "softmax", True, 1.0
    layer.e_score_correction_bias = None
    return layer


def experts_method(cls: type[Int4ExpertsMethod] = OpsetAwqExpertsMethod, has_zero_points: bool = True):
    method = object.__new__(cls)
    method.moe = SimpleNamespace(router_logits_dtype=torch.float32, in_dtype=torch.float32)
    method.group_size, method.has_zero_points = GROUP, has_zero_points
    return method


def test_int4_weights_of_experts():
    x, logits, layer, fresh = torch.randn(3, INPUTS), torch.randn(3, NUM_EXPERTS), experts_layer(), experts_layer()
    load_experts(layer)
    experts_method().process_weights_after_loading(layer)
    first, at = layer.opset_experts(x, logits), experts_tensors(layer)
    load_experts(layer)
    for weight in ("w13", "w2"):
        for name in ("qweight", "qzeros", "scales"):
            loaded = getattr(layer, f"{weight}_{name}").data.clone()
            setattr(fresh, f"{weight}_{name}", torch.nn.Parameter(loaded, requires_grad=False))
    for each in (layer, fresh):
        experts_method().process_weights_after_loading(each)
    assert experts_tensors(layer) == at
    assert torch.equal(layer.opset_experts(x, logits), fresh.opset_experts(x, logits))
    assert not torch.equal(layer.opset_experts(x, logits), first)


def test_experts_do_not_keep_a_layout_that_a_graph_has_no_kernel_for():
    layer = experts_layer()
    load_experts(layer)
    experts_method().process_weights_after_loading(layer)
    held = experts_of(layer)._held["w1_scale"]
    with pytest.raises(ValueError, match="experts needs another kernel for its new w1_scale: start the engine again"):
        experts_of(layer)._hold("w1_scale", held.mT.contiguous().mT)


def load_gptq_experts(layer: torch.nn.Module, bias: float | None) -> None:
    """bias: the value of all biases; None if the checkpoint has none, whose parameters then hold anything."""
    layer.__dict__.setdefault(LOADED_BIASES, set())
    for weight, outputs, inputs in (("w13", 2 * OUTPUTS, INPUTS), ("w2", INPUTS, OUTPUTS)):
        setattr(layer, f"{weight}_qweight", in_int32(NUM_EXPERTS, inputs // 8, outputs))
        setattr(layer, f"{weight}_scales", scales(NUM_EXPERTS, inputs // GROUP, outputs))
        values = torch.full((NUM_EXPERTS, outputs), torch.nan if bias is None else bias)
        setattr(layer, f"{weight}_bias", torch.nn.Parameter(values, requires_grad=False))
        if bias is not None:
            getattr(layer, LOADED_BIASES).add(f"{weight}_bias")


def test_biases_of_gptq_experts_end_with_the_checkpoint_that_has_them():
    layer, method = experts_layer(), experts_method(OpsetGptqExpertsMethod, has_zero_points=False)
    load_gptq_experts(layer, 0.5)
    method.process_weights_after_loading(layer)
    x, logits, at = torch.zeros(3, INPUTS), torch.randn(3, NUM_EXPERTS), layer.w2_bias.data_ptr()
    assert layer.opset_experts(x, logits).any()
    load_gptq_experts(layer, None)
    method.process_weights_after_loading(layer)
    assert experts_of(layer)._arguments["w2_bias"].data_ptr() == at  # which captured graphs read
    assert not layer.opset_experts(x, logits).any()


def test_biases_that_gptq_experts_did_not_have_need_another_kernel():
    layer, method = experts_layer(), experts_method(OpsetGptqExpertsMethod, has_zero_points=False)
    for bias in (None, 0.0):
        load_gptq_experts(layer, bias)
        method.process_weights_after_loading(layer)
        assert layer.w13_bias is None and layer.w2_bias is None
    for _ in range(2):  # the second time, the layer has the experts that were refused
        load_gptq_experts(layer, 0.5)
        with pytest.raises(ValueError, match="experts needs another kernel for its new w1_bias: start the engine"):
            method.process_weights_after_loading(layer)


def experts_tensors(layer: torch.nn.Module) -> dict[str, int]:
    """The addresses of all that the kernel of a layer's experts is given."""
    experts = experts_of(layer)
    given = experts._arguments | dict(zip(("w1", "w2"), experts._weights(), strict=True))
    found = addresses({name: value for name, value in given.items() if isinstance(value, torch.Tensor)})
    assert found.keys() == {f"{weight}{part}" for weight in ("w1", "w2") for part in ("", "_scale", "_zero_point")}
    return found


def addresses(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def test_only_kernels_for_a_cpu_prepare_experts_weights():
    """`Experts.make_room` frees prepared weights, whose memory a graph might read on another device."""
    preparing = [kernel for kernel in kernels_of("fused_experts", elsewhere=True).values() if "w1" in kernel.prepare]
    assert preparing and all(kernel.devices == ("cpu",) for kernel in preparing)


def test_a_tensor_that_cannot_hold_the_values_is_replaced():
    new = torch.ones(2, 3)
    for old in (None, torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3).to_mkldnn()):
        assert refilled(old, new) is new
    with torch.inference_mode():
        old = torch.zeros(2, 3)
    assert refilled(old, new) is old and torch.equal(old, new)
