"""Loads torch_npu over stand-ins for the driver, and the emulation of its operators.

torch_npu has an environment of its own, made by `make test-ascend`, because it would break the import of torch for
other tests. Where it is not installed, no test of this folder is collected.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("torch_npu") is None:
    collect_ignore_glob = ["*"]
else:
    import stubs

    STUBS = stubs.load()
    import torch_npu  # noqa: F401

    torch.set_num_threads(1)  # the samples are small
    sys.path.append(str(Path(__file__).parents[1] / "ascend_hardware"))


@pytest.fixture(scope="session")
def missing_libraries() -> list[str]:
    """The libraries of Ascend's driver that this machine does not have."""
    return STUBS
