"""Loads the emulated NPU into this process, for vLLM's engine to run on.

The tests of the folder above need torch_npu without a device. So `make test-ascend` runs these tests in a process of
their own, which loads no other conftest.py.
"""

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

ASCEND = Path(__file__).parents[1]
TESTS = ASCEND.parent

if importlib.util.find_spec("torch_npu") is None or "torch_npu" in sys.modules:
    collect_ignore_glob = ["*"]
else:
    sys.path[:0] = map(str, (ASCEND, ASCEND / "driver", TESTS, TESTS / "engine", TESTS / "platform"))
    import emulated_npu

    emulated_npu.load()


@pytest.fixture(scope="session", autouse=True)
def environment():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.delenv("OPSET_PLATFORM", raising=False)  # so `auto` has to find the NPU
        yield


@pytest.fixture(scope="session")
def engine() -> Callable:
    """`engines.running`: an engine in this process, whose steps are small so that measuring them is quick."""
    from engines import running

    @contextmanager
    def on_npu(path, **arguments):
        with running(path, **{"max_num_batched_tokens": 512, "gpu_memory_utilization": 0.05} | arguments) as llm:
            try:
                yield llm
            finally:
                llm.llm_engine.engine_core.shutdown()  # otherwise the next engine finds its memory taken

    return on_npu


@pytest.fixture
def relaxed() -> Iterator:
    """Lets the kernels and the emulation take fp32 where the documents name 16 bits, to compare tokens exactly.

    Yields the number of calls of each operator.
    """
    import emulation

    from vllm_opset.kernels.ascend import _constraints

    wide = {name: dataclasses.replace(o, dtypes=_constraints.FLOATS) for name, o in _constraints.OPERATORS.items()}
    with patch.dict(_constraints.OPERATORS, wide), emulation.mode(emulation.Limits.RELAXED) as calls:
        yield calls


@pytest.fixture
def strict() -> Iterator:
    """Enforces all documented limits, and yields the number of calls of each operator."""
    import emulation

    with emulation.mode(emulation.Limits.STRICT) as calls:
        yield calls
