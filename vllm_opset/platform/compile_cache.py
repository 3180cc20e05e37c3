"""vLLM's cache of graphs that torch.compile has made."""

from typing import TYPE_CHECKING

from vllm_opset import selection

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "opset_compiled_for"
KERNELS = "opset_compiled_with"


def keep_apart(config: "VllmConfig", whose: str) -> None:
    """Has what is compiled under a configuration found by that platform and its parts alone: others it does not fit.

    vLLM takes the additional configuration into the key of its cache.
    """
    config.additional_config = {**config.additional_config, KEY: whose}


def keep_kernels_apart(config: "VllmConfig") -> None:
    """Has what is compiled found by engines alone that have chosen the same kernels, some of which a graph names.

    A worker calls it once its layers have chosen.
    """
    chosen = sorted({str(choice.kernel) for choice in selection.choices()})
    config.additional_config = {**config.additional_config, KERNELS: chosen}
