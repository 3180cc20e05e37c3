"""The command of this package in the process of the tests."""

import pytest
from click.testing import Result
from typer.testing import CliRunner

from vllm_opset import selection
from vllm_opset.cli import app


@pytest.fixture
def command_here(monkeypatch):
    """Runs commands that need no vLLM in this process, which is faster: `command_here("ops", OPSET_KERNELS="…")`."""
    monkeypatch.setattr(selection, "_overrides", None)
    monkeypatch.setattr(selection, "_choices", {})
    for name in ("OPSET_PLATFORM", "OPSET_KERNELS", "OPSET_CONFIG", "OPSET_IMPORT", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")

    def command_here(*words: str, **variables: str) -> Result:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return CliRunner().invoke(app, words)

    return command_here
