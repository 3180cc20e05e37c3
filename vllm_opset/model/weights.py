"""The location of a model's weights."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def offloads(config: "VllmConfig") -> bool:
    """Whether vLLM keeps some weights in the host's memory, and moves them while it serves."""
    offload = config.offload_config
    return offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0
