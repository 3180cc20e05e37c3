"""A CPU refuses some settings of multimodal models before weights are loaded."""

from types import SimpleNamespace

import pytest
import torchvision_stand_in
from small_models import GEMMA3, PALIGEMMA, QWEN3_VL

from vllm_opset.platform import multimodal
from vllm_opset.platform.bridges import has
from vllm_opset.platform.cpu.refusals import RULES
from vllm_opset.platform.refusals import Refusal, check

pytestmark = pytest.mark.window

TEXT_ALONE = pytest.mark.skipif(
    not has("vllm.config.ModelConfig._supports_multimodal_for_mm_prefix")(),
    reason="vLLM 0.26 asks for this attention without images, too: runs with 0.30 and later",
)
NGRAMS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


@pytest.fixture
def torchvision(monkeypatch):
    torchvision_stand_in.install(monkeypatch)


REFUSED = [
    ("bidirectional attention within an image", "--limit-mm-per-prompt", PALIGEMMA, {}),
    ("speculative decoding for multimodal", "--speculative-config", QWEN3_VL, {"speculative_config": NGRAMS}),
    ("adapters", "--enable-lora", QWEN3_VL, {"enable_lora": True}),
    ("PyTorch's for encoders", "--mm-encoder-attn-backend", QWEN3_VL, {"mm_encoder_attn_backend": "FLASH_ATTN"}),
    ("without a language model", "--mm-encoder-only", QWEN3_VL, {"mm_encoder_only": True}),
    ("pruning of videos", "--video-pruning-rate", QWEN3_VL, {"video_pruning_rate": 0.5}),
]


@pytest.mark.parametrize(
    ("feature", "cure", "model", "arguments"),
    REFUSED,
    ids=lambda value: value if isinstance(value, str) and value.startswith("--") else "",
)
def test_refused_with_the_cure(feature, cure, model, arguments, configure, torchvision):
    with pytest.raises(Exception, match=feature) as refusal:
        configure(model, **arguments)
    (line,) = [line for line in str(refusal.value).splitlines() if "vllm-opset" in line]
    assert cure in line


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (QWEN3_VL, {}),
        (QWEN3_VL, {"mm_encoder_attn_backend": "TORCH_SDPA"}),
        (GEMMA3, {}),
        pytest.param(PALIGEMMA, {"limit_mm_per_prompt": {"image": 0}}, marks=TEXT_ALONE),
    ],
)
def test_what_is_served_is_not_refused(model, arguments, configure, torchvision):
    configure(model, **arguments)


def test_no_step_ends_within_an_image_whose_tokens_see_each_other(configure, torchvision):
    assert configure(GEMMA3).scheduler_config.disable_chunked_mm_input
    assert not configure(QWEN3_VL).scheduler_config.disable_chunked_mm_input


def test_an_encoder_with_a_pooled_cache_is_refused(configure, torchvision):
    config = configure(QWEN3_VL)
    config.model_config.hf_config.audio_config = SimpleNamespace(block_pool_size=4)
    with pytest.raises(Refusal, match="pooled KV cache"):
        check(RULES, config, "here")


def test_torchvision_is_asked_for(configure, monkeypatch):
    """Before vLLM imports the model's module, which would fail with a traceback."""
    monkeypatch.setattr(multimodal, "has_torchvision", lambda: False)
    with pytest.raises(Exception, match=r"multimodal models without torchvision: install the build of torchvision"):
        configure(QWEN3_VL)


def test_every_rule_is_tested():
    tested = [*(case[0] for case in REFUSED), "pooled KV cache", "without torchvision"]
    assert not [rule.feature for rule in multimodal.RULES if not any(feature in rule.feature for feature in tested)]
