"""A mixin for the workers of `cuda` and `native`: what they do beside vLLM's worker while an engine starts and ends.

vLLM's worker measures memory, makes the KV cache and captures graphs. The mixin also counts the memory of attention's
partial results. It captures graphs where an engine allows them: full graphs of prompts, and those of the LM head and of
a draft model. Steps that a full graph replays then get no attention metadata. If memory is short, the mixin's error
names the settings to lower.
"""

from vllm.config import ModelConfig, VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_opset.model import sampler
from vllm_opset.platform.cuda import device, draft_graphs, full_graphs, logits_graphs, replays, workspace
from vllm_opset.platform.report import Reporting


class Starting(Reporting):
    """A mixin that comes before vLLM's worker among the bases."""

    vllm_config: VllmConfig
    model_config: ModelConfig

    def will_draw(self) -> bool:
        """Whether `install_sampler` is going to replace the sampler, by what is known before a model is loaded."""
        config = self.vllm_config
        if self.model_config.runner_type == "pooling" or not get_pp_group().is_last_rank:
            return False
        return not config.use_v2_model_runner or (config.speculative_config is None and sampler.fits())

    def install_sampler(self) -> bool:
        """Replace the sampler of the runner, whose model was loaded. Returns whether opset's serves."""
        if self.vllm_config.use_v2_model_runner:
            return sampler.install(self.model_runner)
        from vllm_opset.platform.v1 import sampler as first

        first.install(self.model_runner)
        return True

    def determine_available_memory(self) -> int:
        with device.named_out_of_memory(), workspace.held_while_profiling(self):
            return super().determine_available_memory()

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        with device.named_out_of_memory():
            super().initialize_from_config(kv_cache_config)
        full_graphs.replace_piecewise(self)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        times = super().compile_or_warm_up_model()
        logits_graphs.capture(self)
        draft_graphs.capture(self)
        replays.build_no_metadata(self)
        return times

    def shutdown(self) -> None:
        logits_graphs.drop(self)
        draft_graphs.drop(self)
        super().shutdown()
