"""Fixtures for the tests of the contracts: vLLM's own layers for comparison, and the allowed difference."""

import pytest
import torch

# For values of order 1. vLLM's own code rounds intermediates to the dtype, so it has an error of a few units in the
# last place itself.
SLACK = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


@pytest.fixture(params=SLACK, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture
def agree():
    """Asserts that two tensors are equal up to the rounding of intermediates."""

    def agree(ours: torch.Tensor, theirs: torch.Tensor, scale: float = 1.0) -> None:
        slack = SLACK[ours.dtype]
        torch.testing.assert_close(ours, theirs, rtol=2 * slack, atol=slack * scale)

    return agree


@pytest.fixture
def vllm_layers(monkeypatch):
    """Allows vLLM's layers to be built without an engine. The layers that were built are forgotten afterwards."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding

    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
    with set_current_vllm_config(VllmConfig()):
        yield
