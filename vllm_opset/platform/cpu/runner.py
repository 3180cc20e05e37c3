"""vLLM's second model runner on a CPU. Its Triton kernels are replaced in `runner_kernels`."""

from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_opset.model import sampler
from vllm_opset.platform.cpu.sampler import OpsetCpuSampler


class OpsetCpuRunner(GPUModelRunner):
    def load_model(self, *args, **kwargs) -> None:
        super().load_model(*args, **kwargs)
        sampler.install(self, lambda stock: OpsetCpuSampler(stock, self.device))
