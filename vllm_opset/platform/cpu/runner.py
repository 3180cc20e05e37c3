"""vLLM's second model runner on a CPU. Its Triton kernels are replaced in `runner_kernels`."""

from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_opset.platform.cpu.sampler import OpsetCpuSampler


class OpsetCpuRunner(GPUModelRunner):
    def load_model(self, *args, **kwargs) -> None:
        super().load_model(*args, **kwargs)
        if type(self.sampler) is Sampler:  # a model for embeddings has none, and some models bring their own
            self.sampler = OpsetCpuSampler(self.sampler, self.device)
