"""vLLM with the plugin, in this process."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


@pytest.fixture(scope="session", autouse=True)
def registered(inspect_models_here):
    """The plugin as vLLM's processes have it."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
