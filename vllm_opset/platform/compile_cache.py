"""vLLM's cache of the graphs that torch.compile has compiled."""

from typing import TYPE_CHECKING

from vllm_opset import selection

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "opset_compiled_for"
KERNELS = "opset_compiled_with"


def keep_apart(config: "VllmConfig", whose: str) -> None:
    """Give a platform and its parts their own entries in vLLM's cache: other platforms cannot use these graphs.

    vLLM includes the additional configuration in the key of its cache.
    """
    config.additional_config = {**config.additional_config, KEY: whose}


def is_kept_apart(config: "VllmConfig") -> bool:
    """Whether a platform has completed this configuration, or the one that it is a copy of."""
    return KEY in config.additional_config


def keep_kernels_apart(config: "VllmConfig") -> None:
    """Make the cached graphs visible only to engines that chose the same kernels, because a graph names some of them.

    A worker calls it once its layers have chosen their kernels.
    """
    chosen = sorted({f"{choice.op}={choice.name}" for choice in selection.choices()})
    config.additional_config = {**config.additional_config, KERNELS: chosen}
