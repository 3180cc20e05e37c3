"""What several folders of tests share."""

import pytest
from processes import OUR_FRAME, Server


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
    """Shows the end of a server's log beside the failure of a test that uses it."""
    report = yield
    if report.failed:
        for name, value in item.funcargs.items():
            if isinstance(value, Server):
                report.sections.append((f"log of {name}", value.text()[-5000:]))
    return report
