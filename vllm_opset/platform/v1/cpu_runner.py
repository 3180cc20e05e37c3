"""vLLM's first model runner on a CPU, without the C++ operators that vLLM's own CPU runner installs."""

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_opset.platform.v1 import sampler, slots


class OpsetCpuRunner(CPUModelRunner):
    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        slots.bind(self.input_batch.block_table)
        sampler.install(self)

    def _update_states(self, scheduler_output):
        """Give new seeded requests generators whose draws can be taken back."""
        deferred = super()._update_states(scheduler_output)
        sampler.count_draws(self)
        return deferred

    def _postprocess_triton(self) -> None:
        """Do nothing. vLLM's method (until 0.30) replaces Triton kernels by C++ operators, which are absent here."""

    def may_reinitialize_input_batch(self, *args, **kwargs) -> None:
        super().may_reinitialize_input_batch(*args, **kwargs)
        self._postprocess_tensors()
        slots.bind(self.input_batch.block_table)
