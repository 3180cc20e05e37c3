"""Quantised linear layers as stock vLLM builds them for NVIDIA GPUs, with opset's kernels asked before its own."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear import MPLinearLayerConfig, init_fp8_linear_kernel
from vllm.model_executor.layers.quantization import auto_awq
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Int8
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape,
    create_fp8_quant_key,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
)
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum
from vllm.scalar_type import scalar_types

from vllm_opset import ops
from vllm_opset.model.fp8_linear import OpsetFp8LinearKernel
from vllm_opset.model.int4_linear import AWQ_ORDER, OpsetInt4LinearKernel
from vllm_opset.model.int8_linear import OpsetInt8LinearKernel
from vllm_opset.ops.schemes import FP8, INT8, PER_TENSOR, Quantised, dequantise
from vllm_opset.platform import quantised_weights
from vllm_opset.platform.quantised_layers import KERNEL_LISTS

pytestmark = [pytest.mark.window, pytest.mark.usefixtures("alone")]

IN, OUT, GROUP, TOKENS = 256, 128, 32, 5


@pytest.fixture
def asked_first(monkeypatch) -> Iterator[None]:
    """vLLM takes this device for an NVIDIA GPU when it looks for kernels, and asks opset's first."""
    monkeypatch.setattr(type(current_platform), "_enum", PlatformEnum.CUDA)
    monkeypatch.setattr(auto_awq, "verify_marlin_supported", lambda **layer: None)
    with quantised_weights.linear_kernels_first():
        yield


@pytest.fixture(params=[False, True], ids=["eager", "compiled"])
def multiply(request):
    """The function that calls a layer's method: alone, or as torch.compile compiles it without a graph break."""
    torch._dynamo.reset()  # else it takes the other tests' groups for values that change from call to call
    config = VllmConfig()
    config.compilation_config.mode = CompilationMode.VLLM_COMPILE if request.param else CompilationMode.NONE

    def call(apply, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return apply(layer, x, None)

    with set_current_vllm_config(config):
        yield torch.compile(call, backend="eager", fullgraph=True) if request.param else call


def lists() -> dict[str, list[type]]:
    return {kind: list(getattr(kernels, name)[PlatformEnum.CUDA]) for kind, name in KERNEL_LISTS.items()}


def test_opsets_kernels_are_asked_first_and_taken_back():
    before = lists()
    with quantised_weights.linear_kernels_first(), quantised_weights.linear_kernels_first():
        during = lists()
    assert lists() == before
    for kind, (first, *others) in during.items():
        assert first.__module__.startswith("vllm_opset.") and others == before[kind]


def packed_by_awq(values: torch.Tensor) -> torch.Tensor:
    """[rows, columns] of 4 bits as AWQ packs them along the columns: int32 [rows, columns / 8]."""
    eights = values.to(torch.int64).unflatten(1, (-1, len(AWQ_ORDER)))
    words = sum(eights[:, :, place] << 4 * AWQ_ORDER[place] for place in range(len(AWQ_ORDER)))
    return words.to(torch.int32)  # the highest bit becomes the sign


@pytest.mark.usefixtures("asked_first")
def test_awq(multiply):
    method = auto_awq.AutoAWQMarlinLinearMethod(auto_awq.AutoAWQConfig(4, GROUP, True, False))
    layer = torch.nn.Module()
    method.create_weights(layer, IN, [OUT], IN, OUT, torch.float32, weight_loader=lambda *args: None)
    assert isinstance(method.kernel, OpsetInt4LinearKernel)
    values, zeros = torch.randint(0, 16, (IN, OUT)), torch.randint(0, 16, (IN // GROUP, OUT))
    scales = torch.rand(IN // GROUP, OUT) + 0.5
    layer.qweight.data, layer.qzeros.data = packed_by_awq(values), packed_by_awq(zeros)
    layer.scales.data = scales
    method.process_weights_after_loading(layer)
    x = torch.randn(TOKENS, IN)
    weight = (values - zeros.repeat_interleave(GROUP, 0)) * scales.repeat_interleave(GROUP, 0)
    torch.testing.assert_close(multiply(method.apply, layer, x), x @ weight, rtol=1e-5, atol=1e-3)


GIVEN = 0.0043  # the scale of activations, where it is given
# The groups of activations and of weights that share a scale, by vLLM's keys.
FP8_KEYS = {
    "per channel": (kFp8DynamicTokenSym, kFp8StaticTensorSym),
    "by blocks": (
        create_fp8_quant_key(False, GroupShape(1, 128)),
        create_fp8_quant_key(True, GroupShape(128, 128)),
    ),
    "given": (kFp8StaticTensorSym, kFp8StaticTensorSym),
}


@pytest.mark.usefixtures("asked_first")
@pytest.mark.parametrize("kind", FP8_KEYS)
def test_fp8(kind, multiply, monkeypatch):
    """With activations in fp8, as on a GPU. By the scale that is given, the largest activations are cut off at 448."""
    monkeypatch.setattr("vllm_opset.model.fp8_linear.activation", lambda dtype, group: Quantised(dtype, group))
    by_blocks = kind == "by blocks"
    kernel = init_fp8_linear_kernel(*FP8_KEYS[kind], torch.float32, torch.float32, (OUT, IN), module_name="a test")
    assert isinstance(kernel, OpsetFp8LinearKernel)
    weight = torch.randn(OUT, IN).to(FP8)
    scale = torch.rand(OUT // 128, IN // 128) + 0.5 if by_blocks else torch.rand(OUT, 1) + 0.5
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight if by_blocks else weight.t(), requires_grad=False)
    setattr(layer, "weight_scale_inv" if by_blocks else "weight_scale", torch.nn.Parameter(scale, requires_grad=False))
    layer.input_scale = torch.nn.Parameter(torch.tensor(GIVEN), requires_grad=False) if kind == "given" else None
    kernel.process_weights_after_loading(layer)
    x = torch.randn(TOKENS, IN)
    given = ops.quantise(x, FP8, list(PER_TENSOR), torch.tensor([[GIVEN]]))
    values, scales = given if kind == "given" else kernel._linear.quantise(x)
    expected = dequantise(values, scales, torch.float64) @ dequantise(weight, scale, torch.float64).t()
    out = multiply(kernel.apply_weights, layer, x)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("asked_first")
def test_int8_activations_by_the_largest_scale_of_a_layers_parts(multiply, monkeypatch):
    """With activations in int8, as on a GPU."""
    monkeypatch.setattr("vllm_opset.model.int8_linear.activation", lambda dtype, group: Quantised(dtype, group))
    of_a_model = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
    monkeypatch.setattr("vllm_opset.model.int8_linear.get_current_vllm_config", lambda: of_a_model)
    scheme, layer = CompressedTensorsW8A8Int8("tensor", True, True), torch.nn.Module()
    parts = [OUT // 2, OUT // 2]
    sizes = {"output_partition_sizes": parts, "input_size_per_partition": IN, "params_dtype": torch.float32}
    scheme.create_weights(layer, **sizes, weight_loader=lambda *args: None)
    assert isinstance(scheme.kernel, OpsetInt8LinearKernel)
    layer.weight.data, layer.weight_scale.data = torch.randint(-127, 128, (OUT, IN), dtype=INT8), torch.rand(2) + 0.5
    layer.input_scale.data = torch.tensor([0.029, 0.013])
    weight = dequantise(layer.weight.data, layer.weight_scale.data.repeat_interleave(OUT // 2)[:, None], torch.float64)
    scheme.process_weights_after_loading(layer)
    x = torch.randn(TOKENS, IN)
    values, scale = ops.quantise(x, INT8, list(PER_TENSOR), torch.tensor([[0.029]]))
    expected = dequantise(values, scale, torch.float64) @ weight.t()
    out = multiply(scheme.apply_weights, layer, x)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("group", "is_served"), [(GROUP, True), (48, False), (16, False), (-1, True), (IN, True)])
def test_groups_that_are_no_power_of_two_are_left_to_vllm(group, is_served):
    """They may be as long as a row, whatever its length is."""
    can, why = OpsetInt4LinearKernel.can_implement(int4_config(group))
    assert can is is_served and (can or f"not of {group}" in why)


@pytest.mark.parametrize(("group", "is_served"), [(GROUP, False), (-1, True), (IN, True)])
def test_weights_in_activation_order_by_groups_are_left_to_vllm(group, is_served):
    """The order of a single group changes nothing. vLLM 0.30 and later refuse such weights, and do not say it."""
    config = int4_config(group)
    config.has_g_idx = True
    can, why = OpsetInt4LinearKernel.can_implement(config)
    assert can is is_served and (can or "act-order" in why)


def int4_config(group: int) -> MPLinearLayerConfig:
    sizes = {"full_weight_shape": (IN, OUT), "partition_weight_shape": (IN, OUT), "group_size": group}
    given = sizes | {"weight_type": scalar_types.uint4b8, "act_type": torch.float16, "zero_points": False}
    says = {"has_g_idx": False} if "has_g_idx" in MPLinearLayerConfig.__annotations__ else {}
    return MPLinearLayerConfig(**given, **says)
