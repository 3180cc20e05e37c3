"""vLLM's first model runner on an NPU, without Triton kernels, and with separate keys and values in the cache."""

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_opset.platform.npu.attention import change_blocks, split_kv_cache
from vllm_opset.platform.v1 import sampler, slots


class OpsetNpuRunner(GPUModelRunner):
    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        slots.bind(self.input_batch.block_table)
        sampler.install(self)

    def may_reinitialize_input_batch(self, *args, **kwargs) -> None:
        super().may_reinitialize_input_batch(*args, **kwargs)
        slots.bind(self.input_batch.block_table)

    def initialize_kv_cache_tensors(self, *args, **kwargs) -> dict[str, torch.Tensor]:
        """Split the KV caches into keys and values after vLLM has allocated and shared their memory among layers."""
        kv_caches = super().initialize_kv_cache_tensors(*args, **kwargs)
        self.kv_caches[:] = map(split_kv_cache, self.kv_caches)
        for name in kv_caches:
            layer = self.compilation_config.static_forward_context[name]
            layer.kv_cache = split_kv_cache(layer.kv_cache)
        return {name: split_kv_cache(kv_cache) for name, kv_cache in kv_caches.items()}

    def _init_kv_zero_meta(self) -> None:
        """Do nothing: vLLM collects addresses here for its Triton kernel, which this runner does not use."""

    def _update_states(self, scheduler_output):
        return super()._update_states(change_blocks(self, scheduler_output))
