"""Engines for the tests, on the platform of this machine."""

from collections.abc import Callable

import pytest
from engines import running


@pytest.fixture(scope="session")
def engine() -> Callable:
    return running
