"""vLLM's cache of graphs that torch.compile has made."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "opset_compiled_for"


def keep_apart(config: "VllmConfig", whose: str) -> None:
    """Has what is compiled under a configuration found by that platform and its parts alone: others it does not fit.

    vLLM takes the additional configuration into the key of its cache.
    """
    config.additional_config = {**config.additional_config, KEY: whose}
