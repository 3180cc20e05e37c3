"""How a busy server ends. The fixture `server` tests the end of an idle one. test_accuracy.py tests Ctrl-C."""

import asyncio

import pytest
from processes import Server, wait_until
from questions import long_ones
from streams import Stream, client

pytestmark = pytest.mark.serve

# Long enough to be running when the signal arrives.
ENDLESS = {"max_tokens": 400, "ignore_eos": True, "prompt": "zq"}
CLIENTS = 8


@pytest.fixture
def own(request, tmp_path):
    """A server that the test may end, with the arguments of its parametrization."""
    server = Server(tmp_path / "log", *getattr(request, "param", ()))
    try:
        yield server.wait_until_ready()
    finally:
        server.kill()


def test_a_sigterm_during_load(own):
    """vLLM drops open streams, some without a message: their clients hang up when the engine is gone."""

    async def load() -> None:
        async with client(own) as http:
            streams = [Stream() for _ in range(CLIENTS)]
            readers = [asyncio.create_task(stream.read(http, **ENDLESS)) for stream in streams]
            await asyncio.gather(*(stream.begun.wait() for stream in streams))
            assert not any(stream.done for stream in streams)
            own.process.terminate()
            await asyncio.to_thread(wait_until, lambda: "HTTP server" in own.text(), "the engine is stopped")
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    asyncio.run(load())
    own.assert_ended_well(own.wait())


@pytest.mark.parametrize("own", [("--shutdown-timeout", "120")], indirect=True, ids=["120 seconds"])
def test_a_sigterm_with_time_to_finish(own):
    """With --shutdown-timeout, running requests are served to their end."""
    tasks = long_ones(CLIENTS)

    async def load() -> list[Stream]:
        async with client(own) as http:
            streams = [Stream() for _ in tasks]
            readers = [
                asyncio.create_task(stream.read(http, **ENDLESS | {"prompt": task["completion"]}))
                for stream, task in zip(streams, tasks, strict=True)
            ]
            await asyncio.gather(*(stream.begun.wait() for stream in streams))
            assert not any(stream.done for stream in streams)
            own.process.terminate()
            return await asyncio.gather(*readers)

    for task, stream in zip(tasks, asyncio.run(load()), strict=True):
        assert stream.done
        assert stream.text.startswith(f" {task['answer']}")
    own.assert_ended_well(own.wait())
