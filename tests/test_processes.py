"""The programs that the tests start."""

import pytest
from processes import run

import vllm_opset

FIND = "import importlib.util; print(importlib.util.find_spec('vllm_opset').origin)"


@pytest.mark.parametrize("variables", [{}, {"PYTHONPATH": "/a/folder"}], ids=["by default", "with a folder more"])
def test_programs_find_the_package_that_the_tests_import(variables):
    """Without site-packages (-S), where another checkout may be installed, and the working directory (-P)."""
    assert run("python", "-PS", "-c", FIND, **variables).out.strip() == vllm_opset.__file__
