"""The worker process on a CPU: its device, the memory for the KV cache, and the report of chosen kernels."""

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.utils import report_usage_stats
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_opset.model import adapters, fusion, packed_linear
from vllm_opset.platform import quantised_weights, second_runner
from vllm_opset.platform.cpu import kv_memory, recorded_steps, runner_kernels, threads
from vllm_opset.platform.worker import OpsetWorker

logger = init_logger(f"vllm.{__name__}")


class OpsetCpuWorker(OpsetWorker):
    """vLLM's worker for GPUs with a CPU as the device. Everything that does not touch a GPU is vLLM's."""

    def __init__(self, vllm_config: VllmConfig, *args, **kwargs) -> None:
        if vllm_config.use_v2_model_runner:
            second_runner.launch_without_triton()
            runner_kernels.REGISTRY.register()
            if vllm_config.speculative_config is not None:
                second_runner.draft_without_triton()
                second_runner.record_no_stream()
                runner_kernels.DRAFTS.register()
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        threads.set_compute_threads(self.parallel_config.local_world_size)
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )
        set_random_seed(self.model_config.seed)
        self.model_runner = self._make_model_runner()
        if self.rank == 0:
            report_usage_stats(self.vllm_config)

    def _make_model_runner(self):
        if self.vllm_config.use_v2_model_runner:
            second_runner.name_cpu_as_cuda()
            from vllm_opset.platform.cpu.runner import OpsetCpuRunner
        else:
            from vllm_opset.platform.v1.cpu_runner import OpsetCpuRunner
        return OpsetCpuRunner(self.vllm_config, self.device)

    def load_model(self, **kwargs) -> None:
        quantised_weights.register(self.model_config)
        num_threads = torch.get_num_threads()
        super().load_model(**kwargs)
        # In 0.32 and 0.33, vLLM's worker for GPUs leaves PyTorch one thread here, and says so. On a CPU, the threads
        # compute the model.
        torch.set_num_threads(num_threads)
        logger.info("Computing with %d thread(s); set OPSET_NUM_THREADS to choose", num_threads)
        self.fuse()
        for model in self.models:
            packed_linear.bind(model)

    def fuse(self) -> None:
        """Let one kernel do the work of several layers, where it can, and layers of experts do without an operator."""
        for model in self.models:
            fusion.bind(model, self.vllm_config)
        if self.model_config.is_moe:
            # Imported late: vLLM's module of experts imports thousands of others.
            from vllm_opset.model import experts

            for model in self.models:
                experts.call_directly(model)

    def _rebind(self) -> None:
        super()._rebind()
        if self.recorded_steps is not None:
            self.recorded_steps.forget()

    def determine_available_memory(self) -> int:
        if self.lora_config is not None:
            adapters.take_memory(self.model_runner.get_model().lora_manager)
        return kv_memory.budget(self.vllm_config, self.get_kv_cache_spec().values())

    def compile_or_warm_up_model(self) -> CompilationTimes:
        # Nothing is compiled.
        self.leave_out_rows()
        self.log_choices()
        if self.vllm_config.use_v2_model_runner:
            from vllm_opset.model import warm_up
        else:
            from vllm_opset.platform.v1 import warm_up
        warm_up.one_step(self.model_runner)
        set_random_seed(self.model_config.seed)
        self.recorded_steps = recorded_steps.bind(self.model_runner.get_model(), self.vllm_config)
        return CompilationTimes(language_model=0.0, encoder=0.0)
