"""The worker process on an NPU."""

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.utils import report_usage_stats
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes
from vllm.v1.worker.workspace import init_workspace_manager

from vllm_opset.platform import compat, quantised_weights, second_runner
from vllm_opset.platform.npu import runner_kernels
from vllm_opset.platform.npu.memory import Budget
from vllm_opset.platform.worker import OpsetWorker


class OpsetNpuWorker(OpsetWorker):
    """vLLM's worker for GPUs, with an NPU as the device."""

    def __init__(self, vllm_config: VllmConfig, *args, **kwargs) -> None:
        if vllm_config.use_v2_model_runner:
            second_runner.launch_without_triton()
            second_runner.copy_to_device()
            runner_kernels.REGISTRY.register()
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        from vllm_opset.platform.npu import graphs  # torch_npu is imported by now

        compat.name_npu_as_cuda(graphs.DecodeGraph, graphs.capture)
        self.device = torch.device("npu", self.local_rank)
        torch.npu.set_device(self.device)
        # The operators' documents assume it. Without it, some products compile PyTorch's operators for every new shape.
        torch.npu.set_compile_mode(jit_compile=False)
        current_platform.check_if_supports_dtype(self.model_config.dtype)
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        set_random_seed(self.model_config.seed)
        self.budget = Budget(self.device, self.cache_config)
        init_workspace_manager(self.device)
        self.model_runner = self._make_model_runner()
        if self.rank == 0:
            report_usage_stats(self.vllm_config)

    def _make_model_runner(self):
        if self.vllm_config.use_v2_model_runner:
            from vllm_opset.platform.npu.runner import OpsetNpuRunner
        else:
            from vllm_opset.platform.v1.npu_runner import OpsetNpuRunner
        return OpsetNpuRunner(self.vllm_config, self.device)

    def load_model(self, **kwargs) -> None:
        quantised_weights.register(self.model_config)
        super().load_model(**kwargs)

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        return self.budget.for_kv_cache(self.model_runner.profile_run)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        self.check_choices()
        with compat.own_warm_up(_one_step):
            return super().compile_or_warm_up_model()


def _one_step(worker: Worker) -> None:
    """Run one step before graphs are captured. The operators are already compiled."""
    if worker.vllm_config.use_v2_model_runner:
        from vllm_opset.model import warm_up
    else:
        from vllm_opset.platform.v1 import warm_up
    warm_up.one_step(worker.model_runner)
