"""The rules for speculative decoding that several platforms share."""

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
