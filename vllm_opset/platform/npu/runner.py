"""vLLM's second model runner on an NPU, with separate keys and values in the cache.

Its Triton kernels are replaced in `runner_kernels`.
"""

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_opset.model import sampler
from vllm_opset.platform.npu.attention import change_blocks, split_kv_cache


class OpsetNpuRunner(GPUModelRunner):
    def load_model(self, *args, **kwargs) -> None:
        super().load_model(*args, **kwargs)
        sampler.install(self, lambda stock: sampler.Fp32Sampler(stock, self.device))

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, *args, **kwargs) -> None:
        """Split the KV caches into keys and values after vLLM has allocated and shared their memory among layers."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        self.kv_caches = [split_kv_cache(kv_cache) for kv_cache in self.kv_caches]
        for group in self.kv_cache_config.kv_cache_groups:
            for name in group.layer_names:
                layer = self.compilation_config.static_forward_context[name]
                layer.kv_cache = split_kv_cache(layer.kv_cache)

    def _init_kv_zero_meta(self) -> None:
        """Do nothing: vLLM collects addresses here for its Triton kernel, which this runner does not use."""

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().update_requests(change_blocks(self, scheduler_output))

    # Graphs of decode steps take lengths from the host (`npu/graphs.py`), which vLLM knows exactly without drafts.

    def capture_model(self, *args, **kwargs) -> int:
        captured_bytes = super().capture_model(*args, **kwargs)
        for graph in self.cudagraph_manager.graphs.values():
            graph.seq_lens = self._prepared_seq_lens
        return captured_bytes

    def prepare_attn(self, input_batch: InputBatch):
        self._prepared = input_batch
        return super().prepare_attn(input_batch)

    def prepare_dummy_attn(self, input_batch: InputBatch, *args, **kwargs):
        self._prepared = input_batch
        return super().prepare_dummy_attn(input_batch, *args, **kwargs)

    def _prepared_seq_lens(self) -> list[int]:
        """The number of keys of each request in the step that vLLM has prepared."""
        return self._prepared.seq_lens_cpu_upper_bound.tolist()
