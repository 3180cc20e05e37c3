"""The sampler of vLLM's second model runner on a CPU.

A seeded request draws with the keys of vllm-opset's sampler for the first model runner, so both give the same tokens.
"""

import torch
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_opset.model.sampler import OpsetSampler
from vllm_opset.ops.sampling import philox


class OpsetCpuSampler(OpsetSampler):
    """stock: vLLM's sampler. Logits in another dtype are drawn from in fp32, as the first model runner does."""

    def __init__(self, stock: Sampler, device: torch.device) -> None:
        super().__init__(stock, torch.float32, device)

    def _sample_random(self, logits: torch.Tensor, *args) -> tuple[torch.Tensor, torch.Tensor]:
        return super()._sample_random(logits.float(), *args)

    def _keys(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        draws = positions + 1 - self.req_states.prompt_len.gpu[rows]
        return draw_keys(self.sampling_states.seeds.gpu[rows], draws)


def draw_keys(seeds: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The keys of the draws with these numbers, int64. The first token of an answer is draw 0."""
    counters, of_seeds = draws.long().numpy(), seeds.numpy()
    low, high, *_ = philox.block(counters, 0, 0, 0, of_seeds & philox.MASK, of_seeds >> 32 & philox.MASK)
    return torch.from_numpy(low | high << 32)
