"""How a busy server ends. The fixture `server` tests the end of an idle one. test_accuracy.py tests Ctrl-C."""

import asyncio
from collections.abc import Iterator

import adapters
import models
import pytest
import quantised
import rounding
from processes import MODEL, Server, wait_until
from questions import long_ones
from streams import Stream, client
from transformers import PreTrainedModel

pytestmark = pytest.mark.serve

# Long enough to be running when the signal arrives.
ENDLESS = {"max_tokens": 400, "ignore_eos": True, "prompt": "zq"}
CLIENTS = 8
NUM_TOKENS = 32


def killed_afterwards(server: Server) -> Iterator[Server]:
    """A server that the test may end."""
    try:
        yield server.wait_until_ready()
    finally:
        server.kill()


@pytest.fixture
def patient(tmp_path):
    """It takes adapters while it runs."""
    arguments = ("--shutdown-timeout", "120", "--enable-lora")
    yield from killed_afterwards(Server(tmp_path / "log", *arguments, VLLM_ALLOW_RUNTIME_LORA_UPDATING=1))


@pytest.fixture
def reference(tmp_path) -> PreTrainedModel:
    """transformers' model of the checkpoint that `mixture` serves."""
    models.add_tokenizer(tmp_path)
    return quantised.build("qwen3_moe", tmp_path)


@pytest.fixture
def mixture(reference, tmp_path):
    yield from killed_afterwards(Server(tmp_path / "log", model=tmp_path))


def test_an_int4_mixture_gives_the_tokens_of_transformers_and_a_sigterm_ends_it_during_load(mixture, reference):
    """vLLM drops open streams, some without a message: their clients hang up when the engine is gone.

    Both are one test, because a server takes half a minute.
    """
    prompts = models.prompts()
    answer = mixture.complete(prompts, max_tokens=NUM_TOKENS, ignore_eos=True, return_token_ids=True)
    expected = [models.generate(reference, prompt, NUM_TOKENS)[0] for prompt in prompts]
    assert [choice["token_ids"] for choice in answer["choices"]] == expected
    assert "scheme=uint4 1x32 with zero points by activations as they are, num_experts=8" in mixture.text()

    async def load() -> None:
        async with client(mixture) as http:
            streams = [Stream() for _ in range(CLIENTS)]
            readers = [asyncio.create_task(stream.read(http, **ENDLESS)) for stream in streams]
            await asyncio.gather(*(stream.begun.wait() for stream in streams))
            assert not any(stream.done for stream in streams)
            mixture.process.terminate()
            await asyncio.to_thread(wait_until, lambda: "HTTP server" in mixture.text(), "the engine is stopped")
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    asyncio.run(load())
    mixture.assert_ended_well(mixture.wait())


def test_an_adapter_is_loaded_and_a_sigterm_leaves_time_to_finish(patient, tmp_path):
    """With --shutdown-timeout, running requests are served to their end.

    Both are one test, because a server takes half a minute.
    """
    merged = rounding.loaded(MODEL)
    adapters.save(merged, tmp_path / "adapter")
    loaded = patient.post("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": str(tmp_path / "adapter")})
    assert loaded.status_code == 200, loaded.text
    prompts = models.prompts()
    asked = {"model": "mine", "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
    answers = [choice["token_ids"] for choice in patient.complete(prompts, **asked)["choices"]]
    assert answers == [models.generate(merged, prompt, NUM_TOKENS)[0] for prompt in prompts]

    tasks = long_ones(CLIENTS)

    async def load() -> list[Stream]:
        async with client(patient) as http:
            streams = [Stream() for _ in tasks]
            readers = [
                asyncio.create_task(stream.read(http, **ENDLESS | {"prompt": task["completion"]}))
                for stream, task in zip(streams, tasks, strict=True)
            ]
            await asyncio.gather(*(stream.begun.wait() for stream in streams))
            assert not any(stream.done for stream in streams)
            patient.process.terminate()
            return await asyncio.gather(*readers)

    for task, stream in zip(tasks, asyncio.run(load()), strict=True):
        assert stream.done
        assert stream.text.startswith(f" {task['answer']}")
    patient.assert_ended_well(patient.wait())
