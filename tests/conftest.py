"""Fixtures and hooks that several folders of tests share."""

import pytest
from processes import OUR_FRAME, Server

from vllm_opset.platform.cpu import machine

# Long tests begin first. The tests left at the end are then short, and no core waits for another.
LONG = ("long", "serve", "engine")
# Tests that share a server or an engine stay in one process if there are several. Keys are the starts of their names.
TOGETHER = {f"tests/serve/test_{name}.py": "server" for name in ("accuracy", "api", "bad_input", "load")}
TOGETHER |= {"tests/examples/": "server"}
# They share a fixture that starts another process.
TOGETHER["tests/platform/test_runner_kernels.py"] = "kernels of vLLM's runner"
ENGINES = (
    "engine/test_features",
    "engine/test_logits_graphs_on_gpu",
    "engine/test_quantised_experts_on_gpu",
    "platform/cuda/test_native_on_gpu",
)
TOGETHER |= {f"tests/{name}.py": f"engines of {name}" for name in ENGINES}
# The largest memory of a test process: it holds one engine, and may start another one.
MEMORY_OF_A_PROCESS = 4 << 30


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process for each core, as long as there is memory for them."""
    return max(1, min(machine.physical_cores(), machine.memory().available // MEMORY_OF_A_PROCESS))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Gives a process one test at a time, or the tests of one TOGETHER group at once.

    It replaces pytest-xdist's own --dist=loadgroup, which keeps no group together with pytest 9.2: see its issue 1386.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((shared for start, shared in TOGETHER.items() if nodeid.startswith(start)), nodeid)

    return Scheduling(config, log)


def pytest_collection_modifyitems(items):
    items.sort(key=_turn)


def _turn(item) -> int:
    """The rank of a test: an earlier mark of LONG runs earlier, and a test without any mark runs last."""
    return next((turn for turn, mark in enumerate(LONG) if item.get_closest_marker(mark)), len(LONG))


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """One server for all tests that do not end it. Its own end is a test as well: a SIGTERM while it is idle."""
    server = Server(tmp_path_factory.mktemp("server") / "log", "--enable-prompt-tokens-details")
    try:
        yield server.wait_until_ready()
        assert server.stop() == 0, server.text()
        assert OUR_FRAME not in server.text(), server.text()
    finally:
        server.kill()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Shows the end of a server's log beside the failure of a test that uses the server."""
    report = yield
    if report.failed:
        for name, value in item.funcargs.items():
            if isinstance(value, Server):
                report.sections.append((f"log of {name}", value.text()[-5000:]))
    return report
