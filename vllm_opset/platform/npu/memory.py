"""The amount of an NPU's memory for the KV cache."""

from collections.abc import Callable

import torch
from vllm.config import CacheConfig
from vllm.logger import init_logger

from vllm_opset.platform.sizes import gib

logger = init_logger(f"vllm.{__name__}")


class Budget:
    """The memory budget of a worker. It is made when the worker has its device, before it loads its model.

    gpu_memory_utilization is the worker's share of the NPU's memory. Raises ValueError if less than that is free.
    """

    def __init__(self, device: torch.device, cache_config: CacheConfig) -> None:
        self.device, self.cache_config = device, cache_config
        self.free_at_start, total = self._free_or_cached()
        self.share = int(total * cache_config.gpu_memory_utilization)
        if self.share > self.free_at_start:
            raise ValueError(
                f"{gib(self.free_at_start)} of {gib(total)} are free on {device}, less than "
                f"--gpu-memory-utilization {cache_config.gpu_memory_utilization} asks for ({gib(self.share)}): lower "
                "it, or end what else runs there."
            )

    def for_kv_cache(self, run: Callable[[], None]) -> int:
        """Bytes for the KV cache. run: runs a step of the largest size, without a cache.

        It is the share, less the memory taken since the start, less the peak that `run` needs in addition. If
        --kv-cache-memory-bytes is given, it is that number.
        """
        torch.npu.empty_cache()
        torch.npu.reset_peak_memory_stats(self.device)
        before = torch.npu.memory_allocated(self.device)
        run()
        torch.npu.synchronize()
        needed = torch.npu.max_memory_allocated(self.device) - before
        if self.cache_config.kv_cache_memory_bytes:
            return self.cache_config.kv_cache_memory_bytes
        left = self.share - (self.free_at_start - self._free_or_cached()[0]) - needed
        logger.info("The KV cache takes %s of the %s that this worker may have", gib(left), gib(self.share))
        return left

    def _free_or_cached(self) -> tuple[int, int]:
        """Bytes that nobody uses, including those that PyTorch's allocator caches, and the total bytes of the NPU."""
        torch.npu.empty_cache()
        free, total = torch.npu.mem_get_info(self.device)
        return free + torch.npu.memory_reserved(self.device) - torch.npu.memory_allocated(self.device), total
