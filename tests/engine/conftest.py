"""Engines for the tests, on the platform of this machine."""

import os
from collections.abc import Callable

import pytest
import torch
from engines import running

if torch.cuda.is_available():
    os.environ.setdefault("OPSET_PLATFORM", "cuda")  # vLLM's own kernels may be installed: these tests do without


@pytest.fixture(scope="session")
def engine() -> Callable:
    return running
