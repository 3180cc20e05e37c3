"""Wrong requests by clients: the client gets an error with a reason, and the server continues."""

import json

import pytest
from streams import all_at_once

pytestmark = [pytest.mark.serve, pytest.mark.window]

COMPLETION = {"model": "tiny", "prompt": "reverse: plugin =", "max_tokens": 8}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Write plugin backwards."}]}

# Each item: the change to a good completion, and words of the reason.
WRONG = [
    ({"prompt": "copy: " + "a" * 600}, "maximum context length is 512"),
    ({"prompt": [5] * 600}, "maximum context length is 512"),
    ({"max_tokens": 600}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [100_000]}, "out of vocabulary"),
    ({"prompt": [-1]}, "greater than or equal to 0"),
    ({"model": "tyni"}, "`tyni` does not exist"),
    ({"temperature": -0.5}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e400}, "temperature"),
    ({"top_p": 0}, "top_p must be in (0, 1]"),
    ({"top_p": 1.5}, "top_p must be in (0, 1]"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": 2**70, "temperature": 1.0}, "has top_k=1180591620717411303424"),
    ({"min_p": 1.5}, "min_p must be in [0, 1]"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"n": 0}, "n must be at least 1"),
    ({"seed": "x"}, "seed"),
    ({"logprobs": 100}, "logprobs"),
    ({"prompt_logprobs": -5}, "prompt_logprobs"),
    ({"logit_bias": {"99999": 1}}, "out-of-vocab"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"stop": ""}, "stop"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"structured_outputs": {"regex": "("}}, "regex"),
    ({"structured_outputs": {"json": {"type": "nonsense"}}}, "nonsense"),
]


def assert_refused(response, words: str, server) -> None:
    """The response is a 4xx with a reason, and the next question is answered."""
    assert 400 <= response.status_code < 500, response.text
    assert words in response.json()["error"]["message"] + str(response.json()["error"].get("param"))
    assert server.complete("reverse: plugin =", max_tokens=64)["choices"][0]["text"] == " nigulp"


@pytest.mark.parametrize(("change", "words"), WRONG, ids=[",".join(map(str, change)) for change, _ in WRONG])
def test_a_wrong_request_is_refused(server, change, words):
    assert_refused(server.post("/v1/completions", json.dumps({**COMPLETION, **change})), words, server)


@pytest.mark.parametrize("content", [b'{"model": "tiny", ', b"\xff\xfe", b""], ids=["cut", "no text", "empty"])
def test_invalid_json_is_refused(server, content):
    assert_refused(server.post("/v1/completions", content), "", server)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": []}, ""),
        ({"messages": [{"role": "user", "content": "a" * 2000}]}, "maximum context length is 512"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "multimodal"),
        ({"temperature": 3}, "temperature"),
    ],
    ids=["empty", "long", "image", "hot"],
)
def test_a_wrong_chat_is_refused(server, change, words):
    assert_refused(server.post("/v1/chat/completions", {**CHAT, **change}), words, server)


def test_a_bad_request_beside_good_ones_harms_nobody(server):
    """The server refuses it before it reaches the batch."""

    async def ask(http, wrong: bool) -> tuple[int, str]:
        request = {**COMPLETION, "max_tokens": 64, "temperature": -1 if wrong else 0}
        response = await http.post("/v1/completions", json=request)
        return response.status_code, "" if wrong else response.json()["choices"][0]["text"]

    answers = all_at_once(server, ask, [False, True] * 8)
    assert answers == [(200, " nigulp"), (400, "")] * 8


def test_a_request_whose_last_seed_is_too_large_harms_nobody(server):
    """vLLM's second model runner refuses it, and its first one serves it: the second answer has the seed 2⁶³."""
    response = server.post("/v1/completions", {**COMPLETION, "temperature": 1.0, "seed": 2**63 - 1, "n": 2})
    if response.status_code == 200:
        assert len(response.json()["choices"]) == 2
    else:
        assert_refused(response, "has the seed 9223372036854775807 and n=2", server)


@pytest.mark.parametrize("option", [{"top_k": 10**6}, {"top_k": 2**31}, {"seed": -5}, {"seed": 2**63 - 1}], ids=str)
def test_what_is_large_but_in_range_is_served(server, option):
    request = {**COMPLETION, "max_tokens": 64, "temperature": 0.1, **option}
    assert server.post("/v1/completions", request).status_code == 200
