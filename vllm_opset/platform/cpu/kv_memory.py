"""The amount of memory for the KV cache."""

import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_opset.platform.cpu import machine
from vllm_opset.platform.sizes import GIB, gib

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

logger = init_logger(f"vllm.{__name__}")

VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
# Stays free for activations, other processes and the file cache if gpu_memory_utilization would leave less.
HEADROOM = GIB
CURE = (
    "Set --kv-cache-memory-bytes to what is to be used, raise --gpu-memory-utilization (on a CPU: the share of the "
    "machine's memory that may be in use, by anyone), free memory, or take a smaller model or dtype."
)


def budget(vllm_config: "VllmConfig", specs: Iterable["KVCacheSpec"]) -> int:
    """Bytes for this worker's KV cache, measured after its weights were loaded. specs: of its layers.

    `--kv-cache-memory-bytes`, or VLLM_CPU_KVCACHE_SPACE in GiB, is used as it is, if that much memory is available
    for each worker. Otherwise the workers share the memory that is available beyond a reserve. The reserve is the part
    of the memory that gpu_memory_utilization leaves, and at least 1 GiB. If a control group limits memory, the lowest
    limit replaces the machine's memory. No worker takes more than --max-num-seqs requests of --max-model-len tokens can
    fill, and one more request: vLLM keeps a block for itself, and may pad groups of layers.
    Raises ValueError if there is too little memory.
    """
    memory = machine.memory()
    num_workers = vllm_config.parallel_config.local_world_size
    asked = vllm_config.cache_config.kv_cache_memory_bytes or users_choice()
    if asked is not None:
        if num_workers * asked > memory.available:
            each = f" for each of {num_workers} workers" if num_workers > 1 else ""
            raise ValueError(
                f"A KV cache of {gib(asked)}{each} is asked for, and {gib(memory.available)} are free. Ask for less by "
                f"--kv-cache-memory-bytes or {VARIABLE}, free memory, or take a smaller model or dtype."
            )
        return asked
    reserve = max(HEADROOM, int((1 - vllm_config.cache_config.gpu_memory_utilization) * memory.total))
    share = (memory.available - reserve) // num_workers
    if share <= 0:
        raise ValueError(
            f"No memory is left for the KV cache: {gib(memory.available)} of {gib(memory.total)} are free, and "
            f"{gib(reserve)} are to stay free. {CURE}"
        )
    of_request = sum(spec.max_memory_usage_bytes(vllm_config) for spec in specs)
    useful = (vllm_config.scheduler_config.max_num_seqs + 1) * of_request
    taken = min(share, useful)
    logger.info("The KV cache takes %s; %s of %s were free", gib(taken), gib(memory.available), gib(memory.total))
    return taken


def users_choice() -> int | None:
    """Bytes from vLLM's variable for its CPU platform; None if it is 0 or unset. Raises ValueError if it is no size."""
    gibibytes = os.environ.get(VARIABLE) or "0"
    if not re.fullmatch(r"\d+\.?\d*|\.\d+", gibibytes):
        raise ValueError(
            f"{VARIABLE}={gibibytes!r} is no number of GiB. Set it to one, as in {VARIABLE}=4, or unset it"
        )
    return int(float(gibibytes) * GIB) or None
