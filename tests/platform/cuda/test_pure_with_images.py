"""Multimodal models on GPUs without compiled kernels, as far as it can be tested without a GPU."""

from collections.abc import Callable

import pytest
import torch
import torchvision_stand_in
from small_models import GEMMA3, LLAMA, QWEN2_VL, QWEN3_VL

from vllm_opset.platform import multimodal
from vllm_opset.platform.cuda.refusals import RULES, WITH_IMAGES
from vllm_opset.platform.refusals import Refusal

pytestmark = pytest.mark.window

DECODE = {"cudagraph_mode": "FULL_DECODE_ONLY"}


@pytest.fixture
def configured(configure, on_a_gpu, monkeypatch) -> Callable:
    """`configured(model, **arguments)`: the configuration that the platform for GPUs completes."""
    from vllm.config import VllmConfig

    from vllm_opset.platform.cuda.platform import OpsetCudaPlatform

    torchvision_stand_in.install(monkeypatch)
    if hasattr(VllmConfig, "_maybe_enable_breakable_cudagraph"):
        monkeypatch.setattr(
            VllmConfig, "_maybe_enable_breakable_cudagraph", VllmConfig._maybe_enable_breakable_cudagraph
        )
    for model in (GEMMA3, QWEN2_VL, QWEN3_VL):
        configure(model)  # reads the model's class: without a GPU, only this machine's platform imports it
    on_a_gpu(OpsetCudaPlatform)
    return configure


REFUSED = [
    ("quantised weights of multimodal", "not quantised", QWEN3_VL, {"quantization": "fp8"}),
    ("torch.compile for multimodal", "--compilation-config", QWEN3_VL, {"compilation_config": {"mode": 3}}),
    ("offloading the weights of multimodal", "--offload-*", QWEN3_VL, {"offload_group_size": 2}),
    ("CUDA graphs of multimodal", "cudagraph_mode", QWEN2_VL, {"compilation_config": DECODE}),
    ("workers share by images", "--mm-encoder-tp-mode", QWEN3_VL, {"mm_encoder_tp_mode": "data"}),
    ("decoding videos", "--mm-ipc-gpu-memory-gb", QWEN3_VL, {"mm_ipc_gpu_memory_gb": 1.0}),
    # The CPU's tests have all rules that both platforms share.
    ("adapters", "--enable-lora", QWEN3_VL, {"enable_lora": True}),
    ("without a mode", "cudagraph_mm_encoder", QWEN3_VL, {"compilation_config": {"cudagraph_mm_encoder": True}}),
]


@pytest.mark.parametrize(("feature", "cure", "model", "arguments"), REFUSED)
def test_refused_with_the_cure(feature, cure, model, arguments, configured):
    with pytest.raises(Exception, match="vllm-opset on a GPU") as refusal:
        configured(model, **{"dtype": "bfloat16"} | arguments)
    (line,) = [line for line in str(refusal.value).splitlines() if "vllm-opset" in line]
    assert feature in line and cure in line


@pytest.mark.parametrize(
    ("model", "arguments", "graphs"),
    [
        (QWEN3_VL, {}, "FULL_AND_PIECEWISE"),
        (GEMMA3, {}, "FULL_AND_PIECEWISE"),
        (QWEN3_VL, {"compilation_config": DECODE}, "FULL_DECODE_ONLY"),
        (QWEN3_VL, {"enforce_eager": True}, "NONE"),
        # Nobody has looked whether a graph would replay features of another step's images.
        (QWEN2_VL, {}, "NONE"),
        (QWEN2_VL, {"language_model_only": True}, "FULL_AND_PIECEWISE"),
        (GEMMA3, {"limit_mm_per_prompt": {"image": 0}}, "FULL_AND_PIECEWISE"),
    ],
)
def test_what_is_served_has_graphs(model, arguments, graphs, configured):
    config = configured(model, dtype="bfloat16", **arguments)
    assert (config.compilation_config.mode.name, config.compilation_config.cudagraph_mode.name) == ("NONE", graphs)
    # No step ends within an image whose tokens see each other.
    assert config.scheduler_config.disable_chunked_mm_input or model is not GEMMA3 or "limit_mm_per_prompt" in arguments


def test_towers_have_these_kinds_of_attention(configured):
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import get_attn_backend

    with set_current_vllm_config(configured(GEMMA3, dtype="bfloat16")):
        assert get_attn_backend(64, torch.bfloat16, "auto", use_mm_prefix=True).get_name() == "CUSTOM"
    assert current_platform.get_vit_attn_backend(72, torch.bfloat16).name == "TORCH_SDPA"


def test_torchvision_is_asked_for(configured, monkeypatch):
    """Before vLLM imports the model's module, which would fail with a traceback."""
    monkeypatch.setattr(multimodal, "has_torchvision", lambda: False)
    with pytest.raises(Exception, match=r"on a GPU.* multimodal models without torchvision: install the build"):
        configured(QWEN3_VL)
    configured(LLAMA)


def test_npus_refuse_them_all():
    from vllm_opset.platform.npu.refusals import RULES as OF_NPUS

    with pytest.raises(Refusal, match="does not support multimodal models: choose another model"):
        multimodal.check(OF_NPUS, "on an NPU")


def test_every_rule_of_its_own_is_tested():
    tried = [feature for feature, *_ in REFUSED]
    assert not [rule.feature for rule in WITH_IMAGES if not any(feature in rule.feature for feature in tried)]
    assert {*multimodal.RULES} <= {*RULES}
