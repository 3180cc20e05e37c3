"""Experts with int4 and MXFP4 weights as stock vLLM builds them for NVIDIA GPUs, by opset's methods."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from expert_layers import BLOCK, FusedMoE, assert_computes
from vllm.model_executor.layers.fused_moe import MoERunner, RoutedExperts
from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

from vllm_opset.model import bound_experts
from vllm_opset.model.experts import MonolithicMethod
from vllm_opset.model.replaced_methods import REPLACED
from vllm_opset.platform import quantised_layers, quantised_weights
from vllm_opset.platform.bridges import find, has
from vllm_opset.unsupported import Refusal

pytestmark = [pytest.mark.window, pytest.mark.usefixtures("alone", "on_a_gpu")]

GROUP = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in an int32 each of eight outputs is
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of MXFP4, by the low three bits
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
COMPRESSED = {
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
    "ignore": [],
}


def config_of(quantization: str | None = None, speculative_config: object = None, **checkpoint) -> SimpleNamespace:
    """A configuration with what is read of it. checkpoint: the quantization_config of the model's config.json."""
    arch = SimpleNamespace(quantization_config=checkpoint)
    model = SimpleNamespace(
        quantization=quantization, quantization_config=None, hf_config=None, model_arch_config=arch, is_moe=True
    )
    return SimpleNamespace(model_config=model, speculative_config=speculative_config)


SERVED = config_of()


def along(weights: dict[str, torch.Tensor], name: str, dimension: int) -> torch.Tensor:
    """The values of 4 bits of int32, from the low bits up, in a dimension."""
    shifts = torch.arange(0, 32, 4).view(-1, *[1] * (-1 - dimension))
    return ((weights[name].unsqueeze(dimension) >> shifts) & 15).flatten(dimension - 1, dimension)


def awq(weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    def ordered(packed: str) -> torch.Tensor:
        eights = along(weights, f"{name}_{packed}", -1).unflatten(-1, (-1, 8))
        return eights[..., list(AWQ_ORDER)].flatten(-2)

    zeros, scales = ordered("qzeros"), weights[f"{name}_scales"].float()
    return ((ordered("qweight") - zeros.repeat_interleave(GROUP, 1)) * scales.repeat_interleave(GROUP, 1)).mT


def gptq(weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    scales = weights[f"{name}_scales"].float().repeat_interleave(GROUP, 1)
    return ((along(weights, f"{name}_qweight", -2) - 8) * scales).mT


def compressed(weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    scales = weights[f"{name}_weight_scale"].float().repeat_interleave(GROUP, 2)
    return (along(weights, f"{name}_weight_packed", -1) - 8) * scales


def mxfp4_values(weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    known = torch.tensor([sign * magnitude for sign in (1, -1) for magnitude in MAGNITUDES])
    stored, exponents = weights[f"{name}_weight"].int(), weights[f"{name}_weight_scale"].float() - 127
    values = known[torch.stack((stored % 16, stored // 16), -1).flatten(-2)]
    return values * (2.0**exponents).repeat_interleave(32, 2)


# A configuration of vLLM's, and the values of a weight of all experts [num_experts, outputs, inputs].
FORMATS: dict[str, tuple[Callable[[], QuantizationConfig], Callable]] = {
    "AWQ": (lambda: AutoAWQConfig.from_config({"bits": 4, "group_size": GROUP, "zero_point": True}), awq),
    "GPTQ": (
        lambda: AutoGPTQConfig.from_config({"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
        gptq,
    ),
    "compressed-tensors": (lambda: CompressedTensorsConfig.from_config(COMPRESSED), compressed),
    "MXFP4": (lambda: GptOssMxfp4Config.from_config({}), mxfp4_values),
}
# An engine without vLLM's kernels, earlier in this process, may have replaced these.
PATCHES = quantised_layers.serve_int4_experts, quantised_layers.serve_int4_experts_without_marlin
VLLMS = {name: find(name) for patch in PATCHES for name in patch.bridge.changes if has(name)()}


@pytest.fixture
def on_a_gpu(monkeypatch) -> None:
    """vLLM finds kernels for its own methods, as on a GPU."""
    for name, own in VLLMS.items():
        module, _, attribute = name.rpartition(".")
        monkeypatch.setattr(find(module), attribute, own if isinstance(own, type) else lambda *_, **__: True)
        if hasattr(find(module), "select_wna16_moe_backend"):
            chosen = WNA16MoEBackend.EMULATION, None
            monkeypatch.setattr(find(module), "select_wna16_moe_backend", lambda *_, chosen=chosen, **__: chosen)
    monkeypatch.setattr(mxfp4, "select_mxfp4_moe_backend", lambda moe: (Mxfp4MoeBackend.TRITON, None))


@pytest.fixture
def build() -> Callable[..., MoERunner]:
    """`build(config, **arguments)`: four experts with weights of a configuration, built within opset's context."""
    numbers = iter(range(100))

    def build(config: QuantizationConfig, **arguments) -> MoERunner:
        sizes = {"num_experts": 4, "top_k": 2, "hidden_size": BLOCK, "intermediate_size": BLOCK}
        how = {"prefix": f"replaced.{next(numbers)}", "params_dtype": torch.bfloat16, "quant_config": config}
        with quantised_weights.replaced_expert_methods(SERVED):
            return FusedMoE(**sizes | how | arguments)

    return build


def fill(name: str, parameter: torch.Tensor) -> None:
    """Fills a parameter with random values of both signs, and scales of a size."""
    if name.endswith("shape"):
        parameter.fill_(BLOCK)
    elif name.endswith("g_idx"):
        parameter.copy_((torch.arange(parameter.shape[-1]) // GROUP).expand_as(parameter))
    elif parameter.is_floating_point():
        parameter.copy_(torch.rand(parameter.shape) + 0.5 if "scale" in name else torch.zeros(()))
    elif "scale" in name:
        parameter.copy_(torch.randint(124, 130, parameter.shape))
    else:
        bits = torch.iinfo(parameter.dtype)
        parameter.copy_(torch.randint(bits.min, bits.max + 1, parameter.shape))


@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_loaded_and_computed_by_opset(name, build):
    config, values = FORMATS[name]
    made = build(config(), has_bias=name == "MXFP4")
    layer, method = made.routed_experts, made.routed_experts.quant_method
    assert isinstance(method, MonolithicMethod) and made.is_monolithic
    for of, parameter in layer.named_parameters():
        fill(of, parameter.data)
    stored = {of: parameter.data.clone() for of, parameter in layer.named_parameters()}
    method.process_weights_after_loading(layer)
    assert not bound_experts.bind(torch.nn.ModuleList([made]))
    assert_computes(made, values(stored, "w13"), values(stored, "w2"))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("AWQ", {"activation": "relu2"}), ("AWQ", {"has_bias": True}), ("AWQ", {"hidden_size": 144}),
     ("MXFP4", {"intermediate_size": 80, "has_bias": True})],
    ids=["activation", "biases", "rows of no whole groups", "rows of no whole groups, MXFP4"],
)  # fmt: skip
def test_layers_that_opset_does_not_serve_keep_vllms_method(name, arguments, build, monkeypatch):
    # An engine without compiled kernels, which another test has started in this process, refuses such layers.
    monkeypatch.setattr(RoutedExperts, "_get_quant_method", inspect.unwrap(RoutedExperts._get_quant_method))
    config, _ = FORMATS[name]
    method = build(config(), **arguments).routed_experts.quant_method
    assert type(method).__name__ in REPLACED and not isinstance(method, MonolithicMethod)


def test_vllms_methods_are_taken_back(build):
    own = RoutedExperts._get_quant_method
    with quantised_weights.replaced_expert_methods(SERVED):
        assert RoutedExperts._get_quant_method is not own
    assert RoutedExperts._get_quant_method is own


def test_a_choice_of_experts_that_opset_does_not_serve_is_refused_once_it_is_known(build):
    """vLLM's method did not load the weights, so it cannot serve the layer either."""
    made = build(FORMATS["AWQ"][0]())
    made.router._hash_indices_table = torch.zeros(10, 2, dtype=torch.int32)
    with pytest.raises(Refusal, match=r"this choice of experts \(.*Router\) in replaced\.0: switch this part off"):
        bound_experts.bind(torch.nn.ModuleList([made]))


AWQ = {"quantization": "auto_awq", "bits": 4, "group_size": GROUP, "zero_point": True}


@pytest.mark.parametrize(
    ("changes", "replaces"),
    [({}, True), ({"zero_point": False}, False), ({"speculative_config": "a draft model"}, False)],
    ids=["served", "not served", "drafts"],
)
def test_models_that_opset_does_not_build_keep_vllms_methods(changes, replaces):
    """A draft model is built in the same context, and its experts are not bound."""
    own = RoutedExperts._get_quant_method
    with quantised_weights.replaced_expert_methods(config_of(**AWQ | changes)):
        assert (RoutedExperts._get_quant_method is not own) is replaces
