"""vLLM with the plugin, in this process."""

from collections.abc import Iterator

import pytest
from plugin import registered  # noqa: F401

from vllm_opset import selection


@pytest.fixture(autouse=True)
def forgetting() -> Iterator[None]:
    """Leaves no override to the tests of other folders in this process."""
    yield
    selection.configure()
    selection.forget()


@pytest.fixture
def alone() -> Iterator[None]:
    """A tensor-parallel group of a single process, under a configuration without a model."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    selection.configure()
    selection.forget()
    with set_current_vllm_config(VllmConfig()):
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
            parallel_state.initialize_model_parallel()
        yield
