"""Fixtures for the configurations of the platforms for GPUs, made without a GPU."""

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from small_models import LLAMA, QWEN3

from vllm_opset.platform.cuda import graphs
from vllm_opset.targets import Target

COMPILED_KERNELS = "vllm._C_stable_libtorch"
HOPPER = Target("nvidia", "sm90")


@pytest.fixture
def on_a_gpu(configure, monkeypatch):
    """`on_a_gpu(platform)`: from now on this platform completes configurations, as on a Hopper GPU."""
    import vllm.platforms
    from vllm.engine import arg_utils
    from vllm.platforms.interface import DeviceCapability

    from vllm_opset.platform.cuda import nvml

    for model in (LLAMA, QWEN3):
        configure(model)  # reads the model's class: without a GPU, only this machine's platform imports it
    graphs.take_back()  # undoes the settings of that platform
    monkeypatch.setattr(nvml, "gpu", lambda *_: nvml.Gpu("a GPU", 1 << 37, HOPPER))

    def on_a_gpu(platform: type) -> None:
        monkeypatch.setattr(platform, "get_device_capability", lambda *_, **__: DeviceCapability(9, 0), raising=False)
        monkeypatch.setattr(vllm.platforms, "_current_platform", platform())
        monkeypatch.setattr(arg_utils, "current_platform", vllm.platforms._current_platform)

    return on_a_gpu


@pytest.fixture
def native(monkeypatch) -> type:
    """The platform for stock vLLM, whose platform imports the compiled kernels for other code."""
    if importlib.util.find_spec(COMPILED_KERNELS) is None:
        monkeypatch.setitem(sys.modules, COMPILED_KERNELS, ModuleType("nothing"))
    from vllm_opset.platform.native.platform import OpsetNativePlatform

    return OpsetNativePlatform


@pytest.fixture
def attention_of(native, monkeypatch) -> Callable:
    """`attention_of(config, named, **wanted)`: the backend of a layer that opset's attention could serve, on Hopper.

    named: the backend that users named. wanted: fields of vLLM's AttentionSelectorConfig.
    """
    from vllm.config import set_current_vllm_config
    from vllm.platforms.cuda import CudaPlatform
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

    monkeypatch.setattr(sys.modules[native.__module__], "_why_not", lambda *_: [])
    monkeypatch.setattr(CudaPlatform, "get_attn_backend_cls", classmethod(lambda *_, **__: "vLLM's"))
    monkeypatch.setattr(native, "get_device_capability", lambda *_, **__: DeviceCapability(9, 0), raising=False)

    def attention_of(config, named=None, **wanted) -> str:
        layer = AttentionSelectorConfig(64, torch.bfloat16, "auto", 16, **wanted)
        with set_current_vllm_config(config):
            return native.get_attn_backend_cls(named, layer, 8)

    return attention_of
