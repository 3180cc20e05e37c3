"""The methods of speculative decoding, by vLLM's names."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NGRAM = "ngram"
# Each method that was tried, and the kind that evidence and refusals name.
KINDS: Mapping[str, str] = {
    NGRAM: "n-gram drafts",
    "draft_model": "drafts by a draft model",
    "eagle": "drafts by EAGLE",
    "eagle3": "drafts by EAGLE",
    "mtp": "drafts by MTP",
}
MODELS = tuple(method for method in KINDS if method != NGRAM)  # in these, a model drafts


def method(config: "VllmConfig") -> str | None:
    """vLLM's name of the method; None if no tokens are drafted."""
    return config.speculative_config and config.speculative_config.method
