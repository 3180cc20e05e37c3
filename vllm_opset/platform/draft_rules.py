"""The rules for speculative decoding that several platforms share."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_opset.platform import drafts
from vllm_opset.platform.quantised_weights import unserved
from vllm_opset.platform.refusals import Rule

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _quantises_otherwise(config: "VllmConfig") -> bool:
    """Whether the model that drafts has quantised weights in a format that is not served, or not that of its target."""
    if drafts.method(config) not in drafts.MODELS:
        return False
    draft = config.speculative_config.draft_model_config
    alike = draft.quantization == config.model_config.quantization
    return draft.quantization is not None and (not alike or any(unserved(draft)))


# Settings of --speculative-config by which a model that drafts has other kernels than its target. Releases lack some.
BACKENDS = ("moe_backend", "attention_backend", "draft_lm_head_quantization")
AS_ITS_TARGET = (None, "auto", "CUSTOM")


def given(config: "VllmConfig", names: Sequence[str]) -> list:
    """The values of these settings of --speculative-config; none where no tokens are drafted."""
    values = (getattr(config.speculative_config, name, None) for name in names)
    return [getattr(value, "name", value) for value in values]


def differs(config: "VllmConfig", names: Sequence[str], alike: Sequence[str | None] = AS_ITS_TARGET) -> bool:
    """Whether one of these settings has another value than those with which a model drafts as its target runs."""
    return any(value not in alike for value in given(config, names))


ANOTHER_METHOD = Rule(
    "speculative decoding by another method",
    f"give one of the methods {', '.join(drafts.KINDS)} in --speculative-config, or leave it out",
    lambda config: drafts.method(config) not in (None, *drafts.KINDS),
)
QUANTISED_OTHERWISE = Rule(
    "a model that drafts with quantised weights of its own",
    "choose one without quantised weights for --speculative-config, or one in its target's format",
    _quantises_otherwise,
)
