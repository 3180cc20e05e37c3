"""The sampler of vLLM's second model runner on a CPU.

A seeded request draws with the keys of vllm-opset's sampler for the first model runner, so both give the same tokens.
"""

import functools

import numpy as np
import torch

from vllm_opset.model.sampler import Fp32Sampler
from vllm_opset.ops.sampling import philox

# NumPy makes this many keys of a request in the time of one. The cache holds more requests than a CPU serves at once.
KEYS_AT_A_TIME, REQUESTS = 64, 4096


class OpsetCpuSampler(Fp32Sampler):
    def _keys(self, rows: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        requests = rows.numpy()
        draws = positions.numpy() + 1 - self.req_states.prompt_len.np[requests]
        return draw_keys(self.sampling_states.seeds.np[requests], draws)


def draw_keys(seeds: np.ndarray, draws: np.ndarray) -> torch.Tensor:
    """The keys of the draws with these numbers, int64. The first token of an answer is draw 0."""
    parts, places = np.divmod(draws, KEYS_AT_A_TIME)
    of_draws = zip(seeds.tolist(), parts.tolist(), places.tolist(), strict=True)
    return torch.tensor([_keys_of(seed, part)[place] for seed, part, place in of_draws], dtype=torch.int64)


@functools.lru_cache(maxsize=REQUESTS)
def _keys_of(seed: int, part: int) -> list[int]:
    """The keys of draws from part · KEYS_AT_A_TIME on."""
    counters = np.arange(KEYS_AT_A_TIME) + part * KEYS_AT_A_TIME
    low, high, *_ = philox.block(counters, 0, 0, 0, seed & philox.MASK, seed >> 32 & philox.MASK)
    return (low | high << 32).tolist()
