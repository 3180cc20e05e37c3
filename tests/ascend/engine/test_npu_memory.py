"""How much of the memory that the emulated NPU counts goes to the KV cache."""

import pytest
import torch
from vllm.config import CacheConfig

from vllm_opset.platform.npu.memory import Budget

DEVICE = torch.device("npu", 0)
MIB = 2**20


def test_it_is_the_share_without_what_was_taken_and_what_a_step_needs():
    _, total = torch.npu.mem_get_info()
    budget = Budget(DEVICE, CacheConfig(gpu_memory_utilization=0.5))
    weights = torch.empty(96 * MIB, dtype=torch.uint8, device=DEVICE)

    def step():
        torch.empty(160 * MIB, dtype=torch.uint8, device=DEVICE)

    for _ in range(2):  # the second time, PyTorch's cache holds the step's memory
        left = budget.for_kv_cache(step)
        assert left == pytest.approx(total // 2 - (96 + 160) * MIB, abs=4 * MIB)
    assert len(weights)


def test_what_is_asked_for_in_bytes_is_taken_at_its_word():
    config = CacheConfig(gpu_memory_utilization=0.5, kv_cache_memory_bytes=12345678)
    assert Budget(DEVICE, config).for_kv_cache(lambda: None) == 12345678


def test_too_little_free_memory_is_an_error_with_its_cure():
    held = torch.empty(1024 * MIB, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match=r"less than --gpu-memory-utilization 0\.9 asks for .*: lower it"):
        Budget(DEVICE, CacheConfig(gpu_memory_utilization=0.9))
    assert len(held)
