"""Quantised linear layers as stock vLLM builds them for NVIDIA GPUs, with opset's kernels asked before its own."""

from collections.abc import Iterator

import pytest
import torch
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear import MPLinearLayerConfig, init_fp8_linear_kernel
from vllm.model_executor.layers.quantization import auto_awq
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape,
    create_fp8_quant_key,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
)
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum
from vllm.scalar_type import scalar_types

from vllm_opset.model.fp8_linear import OpsetFp8LinearKernel
from vllm_opset.model.int4_linear import AWQ_ORDER, OpsetInt4LinearKernel
from vllm_opset.ops.schemes import FP8, Quantised, dequantise
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


@pytest.mark.usefixtures("asked_first")
@pytest.mark.parametrize("by_blocks", [False, True], ids=["per channel", "by blocks"])
def test_fp8(by_blocks, multiply, monkeypatch):
    """With activations in fp8, as on a GPU."""
    monkeypatch.setattr("vllm_opset.model.fp8_linear.activation", lambda dtype, group: Quantised(dtype, group))
    block = GroupShape(128, 128)
    keys = (
        (create_fp8_quant_key(False, GroupShape(1, 128)), create_fp8_quant_key(True, block))
        if by_blocks
        else (kFp8DynamicTokenSym, kFp8StaticTensorSym)
    )
    kernel = init_fp8_linear_kernel(*keys, torch.float32, torch.float32, (OUT, IN), module_name="a test")
    assert isinstance(kernel, OpsetFp8LinearKernel)
    weight = torch.randn(OUT, IN).to(FP8)
    scale = torch.rand(OUT // 128, IN // 128) + 0.5 if by_blocks else torch.rand(OUT, 1) + 0.5
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight if by_blocks else weight.t(), requires_grad=False)
    setattr(layer, "weight_scale_inv" if by_blocks else "weight_scale", torch.nn.Parameter(scale, requires_grad=False))
    kernel.process_weights_after_loading(layer)
    x = torch.randn(TOKENS, IN)
    values, scales = kernel._linear.quantise(x)
    expected = dequantise(values, scales, torch.float64) @ dequantise(weight, scale, torch.float64).t()
    out = multiply(kernel.apply_weights, layer, x)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(
    "has_g_idx" not in MPLinearLayerConfig.__annotations__, reason="this vLLM refuses such weights itself"
)
def test_weights_in_activation_order_are_left_to_vllm():
    config = MPLinearLayerConfig((IN, OUT), (IN, OUT), scalar_types.uint4b8, torch.float16, GROUP, False, True)
    can, why = OpsetInt4LinearKernel.can_implement(config)
    assert not can and "act-order" in why
