"""The worker process on a GPU."""

from contextlib import nullcontext

from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_opset.kernels.triton._constants import assume_unchanged
from vllm_opset.kernels.triton._precompile import precompile
from vllm_opset.model import fusion, linear, quantised_inputs, weights
from vllm_opset.model.warm_up import sampler as call_sampler
from vllm_opset.model.warm_up import step_of_few_tokens
from vllm_opset.platform import compat, compile_cache, deepstack, quantised_weights, refusals, second_runner
from vllm_opset.platform.cuda import device, graphs, pinned, warm_up
from vllm_opset.platform.cuda.starting import Starting
from vllm_opset.platform.worker import OpsetWorker


class OpsetCudaWorker(Starting, OpsetWorker):
    def init_device(self) -> None:
        graphs.check(self.vllm_config)
        if self.vllm_config.use_v2_model_runner:
            second_runner.view_pinned_memory(pinned.view_on_gpu)
        super().init_device()
        if reason := device.too_old(self.device):
            raise RuntimeError(reason)
        current_platform.begin_graph_pool()

    def load_model(self, **kwargs) -> None:
        if graphs.are_piecewise(self.vllm_config):
            compat.break_graphs_at_attention()
        quantised_weights.register(self.model_config)
        with warm_up.draws_meanwhile(self) if self.will_draw() else nullcontext():
            super().load_model(**kwargs)  # launches kernels that quantise weights, so it compiles none ahead
        self.install_sampler()
        with precompile():  # next vLLM measures memory, for which it samples tokens
            call_sampler(self.model_runner)
        for model in self.models:
            deepstack.clear_features_before_each_step(model)
            fusion.bind(model, self.vllm_config, precompile)
            if not weights.offloads(self.vllm_config):  # vLLM itself must handle weights that it moves
                linear.bind(model, compiled=refusals.compiles(self.vllm_config))
        with precompile() if warm_up.takes_any_values(self.model_runner) else nullcontext():
            for model in self.models:
                quantised_inputs.bind(model, self.vllm_config, step_of_few_tokens(self.model_runner))
        compile_cache.keep_kernels_apart(self.vllm_config)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        if not self.vllm_config.use_v2_model_runner:
            from vllm_opset.platform.v1 import slots

            slots.bind(self.model_runner.input_batch.block_table)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        self.check_choices()
        # vLLM's first runner forbids to capture once it has captured, and the second one does not allow it again.
        set_cudagraph_capturing_enabled(True)
        with compat.own_warm_up(warm_up.kernels), device.named_out_of_memory():
            times = super().compile_or_warm_up_model()
        assume_unchanged()
        self.leave_out_rows()  # it launches kernels, which are compiled by now
        return times
