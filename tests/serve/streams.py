"""Many clients at once."""

import asyncio
import json
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field

import httpx
from processes import PATIENCE, Server


@dataclass
class Stream:
    """The data that a client of a streamed completion has received."""

    text: str = ""
    frames: int = 0
    done: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, http: httpx.AsyncClient, leave_after: int | None = None, **request: object) -> "Stream":
        """Reads to the end, or hangs up after this many frames."""
        async with http.stream("POST", "/v1/completions", json=body(**request, stream=True)) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    self.done = True
                elif line:
                    self.text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    self.frames += 1
                    self.begun.set()
                if self.frames == leave_after:
                    break
        return self


def body(**request: object) -> dict:
    return {"model": "tiny", "temperature": 0, **request}


async def complete(http: httpx.AsyncClient, **request: object) -> str:
    response = await http.post("/v1/completions", json=body(**request))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


async def chat(http: httpx.AsyncClient, messages: list[dict], **request: object) -> str:
    response = await http.post("/v1/chat/completions", json=body(messages=messages, **request))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def client(server: Server) -> httpx.AsyncClient:
    # The server hangs up after five idle seconds; a connection that it is about to close must not be used again.
    limits = httpx.Limits(max_connections=256, keepalive_expiry=1)
    return httpx.AsyncClient(base_url=server.http.base_url, timeout=PATIENCE, limits=limits)


def all_at_once(server: Server, ask: Coroutine, things: Iterable) -> list:
    """Runs `ask(http, thing)` concurrently for all things, and returns the answers in their order."""

    async def gather() -> list:
        async with client(server) as http:
            return await asyncio.gather(*(ask(http, thing) for thing in things))

    return asyncio.run(gather())
