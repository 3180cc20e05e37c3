"""Many clients, some of which disconnect."""

import asyncio

import pytest
from processes import wait_until
from questions import grade, long_ones
from streams import Stream, all_at_once, client, complete

pytestmark = [pytest.mark.serve, pytest.mark.window]

CLIENTS = 64
# Requests of the clients that disconnect: they would run much longer than all others.
ENDLESS = {"max_tokens": 480, "ignore_eos": True}
SLOW = 2  # answers of those who leave that may have ended before
# A prompt far from the model's training, after which almost anything may come next.
RANDOM = {"prompt": "zq", "temperature": 1.5, "ignore_eos": True, "max_tokens": 24}


def test_streams_are_right_while_a_third_of_the_clients_leaves(server):
    tasks = long_ones(CLIENTS)
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0, "requests of other tests have ended")
    cut = server.metric("vllm:request_success_total", finished_reason="length")

    async def ask(http, i: int) -> Stream:
        if i % 3 == 0:
            return await Stream().read(http, leave_after=5, prompt=tasks[i]["completion"], **ENDLESS)
        return await Stream().read(http, prompt=tasks[i]["completion"], max_tokens=64)

    streams = all_at_once(server, ask, range(CLIENTS))
    stayed = [(task, stream) for i, (task, stream) in enumerate(zip(tasks, streams, strict=True)) if i % 3]
    assert all(stream.done for _, stream in stayed)
    wrong = [(task["completion"], stream.text) for task, stream in stayed if not grade(task["answer"], stream.text)]
    assert not wrong
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0, "the requests of those who left have ended")
    wait_until(lambda: server.metric("vllm:kv_cache_usage_perc") == 0, "their part of the KV cache is free")
    # A client may be so slow on a busy machine that one of the answers ends before it leaves.
    ended = server.metric("vllm:request_success_total", finished_reason="length") - cut
    assert ended <= SLOW, f"{ended:.0f} answers went on to their end without a reader"


def test_a_seeded_request_is_the_same_alone_and_in_a_crowd(server):
    alone = server.complete(seed=11, **RANDOM)["choices"][0]["text"]
    crowd = [{"seed": 1}, {"seed": 2, "top_k": 5}, {"seed": 3, "top_p": 0.5}, {"seed": 4, "presence_penalty": 1.0}]
    crowd += [{}, {"top_k": 20}, {"min_p": 0.1}, {"temperature": 0}]

    async def in_a_crowd() -> tuple[str, list[Stream]]:
        async with client(server) as http:
            streams = [Stream() for _ in crowd]
            requests = zip(streams, crowd, strict=True)
            readers = [asyncio.create_task(stream.read(http, **RANDOM | ENDLESS | other)) for stream, other in requests]
            await asyncio.gather(*(stream.begun.wait() for stream in streams))
            crowded = await complete(http, seed=11, **RANDOM)
            assert not any(stream.done for stream in streams), "there was no crowd"
            return crowded, await asyncio.gather(*readers)

    crowded, streams = asyncio.run(in_a_crowd())
    assert crowded == alone
    seeded = {stream.text[: len(alone)] for stream, other in zip(streams, crowd, strict=True) if "seed" in other}
    assert len({alone, *seeded}) == 5, (
        "the texts do not depend on the seeds, so this would not notice if they were mixed up"
    )
