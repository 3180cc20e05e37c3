"""vLLM with the plugin, in this process."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def registered(inspect_models_here):
    """The plugin as vLLM's processes have it."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
