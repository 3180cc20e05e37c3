"""What opset's platforms refuse of multimodal models. NPUs serve none, and stock vLLM serves them by its own code."""

import importlib.util
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from vllm_opset.platform import drafts
from vllm_opset.platform.refusals import MERGE_ADAPTER, Rule, Settings, of_model
from vllm_opset.unsupported import ANOTHER_MODEL

if TYPE_CHECKING:
    from vllm.config import MultiModalConfig, VllmConfig

# Of the prefix LMs, only these were compared with transformers. Others differ in which layers and tokens see more.
SERVED_PREFIX_LMS = ("gemma3",)
# A graph replays no Python. In these models' forward methods, none changes what a step computes. Qwen3-VL's is an
# exception, and `deepstack` replaces it. Other models keep features of images in ways of their own.
CAPTURABLE = ("llava", "gemma3", "qwen2_5_vl", "qwen3_vl")
PREFIX_LMS = "multimodal prefix LMs (bidirectional attention within an image)"
POOLED_CACHES = "encoders with a pooled KV cache (Voxtral Realtime)"


def is_multimodal(model) -> bool:
    return model.is_multimodal_model


def has_torchvision() -> bool:
    """Whether torchvision is installed, which transformers and the modules of many models import.

    One that does not fit PyTorch needs no check, because it fails in all of vLLM.
    """
    return importlib.util.find_spec("torchvision") is not None


def pools_cache(model) -> bool:
    """Whether an encoder stores several positions in one slot. For these, vLLM derives backends from its own only."""
    audio = getattr(model.hf_config, "audio_config", None)
    return getattr(audio, "block_pool_size", 1) > 1


def may_keep_images(model) -> bool:
    """Whether a model may keep features of images where the replay of a graph does not see them."""
    takes_images = is_multimodal(model) and not model.multimodal_config.language_model_only
    return takes_images and model.hf_config.model_type not in CAPTURABLE


def if_set(is_set: Callable[["MultiModalConfig"], object]) -> Callable[["VllmConfig"], bool]:
    """Whether a setting of a multimodal model is on."""
    return of_model(lambda model: model.multimodal_config is not None and is_set(model.multimodal_config))


def _encodes_otherwise(config: "MultiModalConfig") -> bool:
    backend = config.mm_encoder_attn_backend
    return config.mm_encoder_attn_dtype is not None or getattr(backend, "name", "TORCH_SDPA") != "TORCH_SDPA"


def check(rules: Iterable[Rule | Settings], where: str) -> None:
    """Raise Refusal if a platform with these rules can serve no multimodal model. It needs no configuration."""
    if MULTIMODAL in rules:
        raise MULTIMODAL.refusal(where)
    if not has_torchvision():
        raise WITHOUT_TORCHVISION.refusal(where)


def schedule_whole_images(config: "VllmConfig") -> None:
    """Let no step end within an image whose tokens see each other, as vLLM's own platforms do."""
    if config.model_config is not None and config.model_config.is_mm_prefix_lm:
        config.scheduler_config.disable_chunked_mm_input = True


MULTIMODAL = Rule("multimodal models", ANOTHER_MODEL, of_model(is_multimodal))

WITHOUT_TORCHVISION = Rule(
    "multimodal models without torchvision",
    "install the build of torchvision that fits this PyTorch, from PyTorch's own index",
    of_model(lambda model: is_multimodal(model) and not has_torchvision()),
)
# The rules of a platform that serves multimodal models.
RULES = (
    WITHOUT_TORCHVISION,
    # vLLM 0.30 and later clear this property of a model that is to have no other input than text.
    Rule(
        f"{PREFIX_LMS} other than Gemma-3",
        "choose another model, or for text alone with vLLM 0.30 and later give --limit-mm-per-prompt '{\"image\": 0}'",
        of_model(lambda model: model.is_mm_prefix_lm and model.hf_config.model_type not in SERVED_PREFIX_LMS),
    ),
    Rule(POOLED_CACHES, ANOTHER_MODEL, of_model(pools_cache)),
    Rule(
        "speculative decoding for multimodal models",
        "leave out --speculative-config",
        lambda config: drafts.method(config) is not None and MULTIMODAL.applies(config),
    ),
    Rule(  # they were not tried together
        "adapters (LoRA) for multimodal models",
        MERGE_ADAPTER,
        lambda config: config.lora_config is not None and MULTIMODAL.applies(config),
    ),
    Rule(
        "another attention than PyTorch's for encoders of images",
        "leave out --mm-encoder-attn-backend and --mm-encoder-attn-dtype",
        if_set(_encodes_otherwise),
    ),
    Rule("an engine without a language model", "leave out --mm-encoder-only", if_set(lambda mm: mm.mm_encoder_only)),
    Rule("pruning of videos", "leave out --video-pruning-rate", if_set(lambda mm: mm.video_pruning_rate)),
)
