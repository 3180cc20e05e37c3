"""Engines for the tests, on the platform of this machine."""

from collections.abc import Callable

import pytest
from engines import running


@pytest.fixture(scope="session")
def engine(inspect_models_here) -> Callable:
    return running
