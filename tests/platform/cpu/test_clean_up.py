"""vLLM's clean-up when an engine ends, on a machine without an accelerator."""

import pytest
import torch

from vllm_opset.platform import compat

pytestmark = [
    pytest.mark.window,
    pytest.mark.skipif(torch.accelerator.is_available(), reason="a machine without an accelerator: runs on one"),
]


@pytest.fixture
def untouched(monkeypatch):
    """Restores PyTorch as it is in a process without a model runner, because this process may have had one."""
    from torch.accelerator import memory

    for name in ("empty_cache", "empty_host_cache"):
        monkeypatch.setattr(torch.accelerator, name, getattr(memory, name))
    with pytest.raises(RuntimeError, match="accelerator"):
        torch.accelerator.empty_cache()


@pytest.mark.usefixtures("untouched")
def test_the_process_of_an_engine_without_a_worker_cleans_up():
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    compat.without_accelerator()
    cleanup_dist_env_and_memory()
