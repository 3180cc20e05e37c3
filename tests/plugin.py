"""A fixture for folders of tests that need the plugin in their process."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def registered():
    """The plugin, registered as in vLLM's processes."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
