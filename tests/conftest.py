"""What several folders of tests share."""

import pytest


@pytest.fixture(scope="session")
def inspect_models_here():
    """vLLM asks about a model's class in a process of its own, to keep CUDA out of this one; it takes ten seconds."""
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
        yield
