"""The features of the OpenAI-compatible API, over HTTP, on the plugin's sampler and attention."""

import json
import math
import re

import pytest
from processes import wait_until

pytestmark = [pytest.mark.serve, pytest.mark.window]

# A task whose answer the model knows, and a prompt far from its training, after which almost anything may come next.
KNOWN = {"prompt": "count: 10 to 19 =", "answer": " 10 11 12 13 14 15 16 17 18 19"}
RANDOM = {"prompt": "zq", "temperature": 1.5, "ignore_eos": True, "max_tokens": 24}


def text(answer: dict) -> str:
    return answer["choices"][0]["text"]


def token_ids(server, characters: str) -> list[int]:
    """One token id for each character."""
    ids = server.post("/tokenize", {"model": "tiny", "prompt": characters}).json()["tokens"]
    assert len(ids) == len(characters)
    return ids


def test_models_and_version(server):
    (model,) = server.http.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 512)
    assert server.http.get("/version").json()["version"]


def test_a_completion(server):
    answer = server.complete(KNOWN["prompt"], max_tokens=64)
    assert text(answer) == KNOWN["answer"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    tokens = server.post("/tokenize", {"model": "tiny", "prompt": KNOWN["prompt"]}).json()["tokens"]
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    assert answer["usage"]["completion_tokens"] == len(KNOWN["answer"]) + 1, "one token a character, and the end"
    assert text(server.complete(tokens, max_tokens=64)) == KNOWN["answer"], "the prompt may be token ids"


def test_several_prompts_in_one_request(server):
    answer = server.complete([KNOWN["prompt"], "reverse: plugin ="], max_tokens=64)
    assert [choice["text"] for choice in answer["choices"]] == [KNOWN["answer"], " nigulp"]


def test_a_chat(server):
    (choice,) = server.chat("Write plugin backwards.", max_tokens=64)["choices"]
    assert (choice["message"]["role"], choice["message"]["content"]) == ("assistant", "nigulp")


def test_a_streamed_completion_is_the_same_token_by_token(server):
    request = {"prompt": KNOWN["prompt"], "max_tokens": 64, "stream_options": {"include_usage": True}}
    *frames, usage = server.stream("/v1/completions", request)
    assert "".join(map(text, frames)) == KNOWN["answer"]
    assert len(frames) > 5
    assert [frame["choices"][0]["finish_reason"] for frame in frames[-2:]] == [None, "stop"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(KNOWN["answer"]) + 1


def test_a_streamed_chat_is_the_same_token_by_token(server):
    messages = [{"role": "user", "content": "Count from 10 to 19."}]
    frames = list(server.stream("/v1/chat/completions", {"messages": messages, "max_tokens": 64}))
    assert "".join(frame["choices"][0]["delta"].get("content") or "" for frame in frames) == KNOWN["answer"].strip()
    assert frames[0]["choices"][0]["delta"]["role"] == "assistant"
    assert len(frames) > 5


def test_n_choices_differ_and_their_seed_repeats_them(server):
    first, second = (server.complete(**RANDOM, n=4, seed=5)["choices"] for _ in range(2))
    assert [choice["index"] for choice in first] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in first}) == 4
    assert [choice["text"] for choice in first] == [choice["text"] for choice in second]
    assert first[0]["text"] != text(server.complete(**RANDOM, seed=6))


def test_n_choices_can_be_streamed(server):
    whole = server.complete(**RANDOM, n=3, seed=5)["choices"]
    texts = ["", "", ""]
    for frame in server.stream("/v1/completions", {**RANDOM, "n": 3, "seed": 5}):
        for choice in frame["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole]


def test_logprobs_are_those_of_a_distribution_and_greedy_takes_the_first(server):
    logprobs = server.complete("zq", max_tokens=8, logprobs=5, ignore_eos=True)["choices"][0]["logprobs"]
    for token, logprob, top in zip(
        *(logprobs[key] for key in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert len(top) == 5
        assert (token, logprob) == next(iter(top.items()))
        assert logprob == max(top.values())
        assert sum(map(math.exp, top.values())) <= 1 + 1e-5


def test_prompt_logprobs_equal_the_logprobs_of_generating(server):
    """A prefill of the whole text and a decode step for each of its tokens see the same distribution."""
    generated = server.complete("zq", max_tokens=20, logprobs=1, ignore_eos=True)["choices"][0]
    steps = generated["logprobs"]["token_logprobs"]
    prompt = server.complete("zq" + generated["text"], max_tokens=1, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    assert prompt[0] is None
    read = [next(iter(position.values()))["logprob"] for position in prompt[-len(steps) :]]
    assert read == pytest.approx(steps, abs=1e-3)


def test_chat_logprobs(server):
    (choice,) = server.chat("Write plugin backwards.", max_tokens=64, logprobs=True, top_logprobs=2)["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(step["token"] for step in content).startswith("nigulp")
    assert all(step["logprob"] == step["top_logprobs"][0]["logprob"] for step in content)


def test_echo(server):
    assert text(server.complete("reverse: plugin =", max_tokens=64, echo=True)) == "reverse: plugin = nigulp"


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [({"regex": "[0-9]{4}"}, "[0-9]{4}"), ({"choice": ["niece", "nephew"]}, "niece|nephew")],
    ids=["regex", "choice"],
)
def test_structured_output(server, constraint, pattern):
    free = text(server.complete("reverse: plugin =", max_tokens=64))
    bound = text(server.complete("reverse: plugin =", max_tokens=64, structured_outputs=constraint))
    assert re.fullmatch(pattern, bound)
    assert not re.fullmatch(pattern, free)


def test_structured_output_by_a_schema(server):
    properties = {
        "kind": {"enum": ["add", "sort"]},
        "digits": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3},
    }
    schema = {"type": "object", "properties": properties, "required": ["kind", "digits"], "additionalProperties": False}
    # White space is allowed everywhere, and this model would write it without end.
    bias = dict.fromkeys(token_ids(server, " \n\t\r"), -100)
    answer = server.complete("sort: 90210 =", max_tokens=100, structured_outputs={"json": schema}, logit_bias=bias)
    value = json.loads(text(answer))
    assert value["kind"] in ("add", "sort")
    assert set(value["digits"]) <= {1, 2}


def test_structured_output_in_company(server):
    """Only some rows of the batch are masked."""
    constraint = {"regex": "[0-9]{4}"}
    answer = server.complete(["zq"] * 4, max_tokens=8, temperature=1.5, seed=3, structured_outputs=constraint, n=2)
    assert all(re.fullmatch("[0-9]{4}", choice["text"]) for choice in answer["choices"])


@pytest.mark.parametrize(
    ("options", "expected", "reason"),
    [
        ({"stop": ["15"]}, " 10 11 12 13 14 ", "stop"),
        ({"stop": ["15"], "include_stop_str_in_output": True}, " 10 11 12 13 14 15", "stop"),
        ({"stop": ["3 1", "never"]}, " 10 11 12 1", "stop"),
        ({"max_tokens": 6}, " 10 11", "length"),
        ({"max_tokens": 1}, " ", "length"),
    ],
)
def test_where_an_answer_ends(server, options, expected, reason):
    (choice,) = server.complete(KNOWN["prompt"], **{"max_tokens": 64, **options})["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected, reason)


def test_stop_token_and_minimum_of_tokens(server):
    (five,) = token_ids(server, "5")
    stopped = server.complete(KNOWN["prompt"], max_tokens=64, stop_token_ids=[five])["choices"][0]
    assert (stopped["text"], stopped["stop_reason"]) == (" 10 11 12 13 14 1", five)
    longer = server.complete("reverse: plugin =", max_tokens=20, min_tokens=20)
    assert longer["usage"]["completion_tokens"] == 20


def test_an_answer_may_fill_the_context(server):
    answer = server.complete("zq", ignore_eos=True, max_tokens=510)
    assert (answer["usage"]["total_tokens"], answer["choices"][0]["finish_reason"]) == (512, "length")


def test_tokens_can_be_favoured_forbidden_and_penalised(server):
    a, b, space = token_ids(server, "ab ")
    assert text(server.complete("zq", max_tokens=5, logit_bias={b: 100}, ignore_eos=True)) == "bbbbb"
    assert set(text(server.complete(**RANDOM, allowed_token_ids=[a, b], seed=1))) == {"a", "b"}
    assert " " not in text(server.complete(KNOWN["prompt"], max_tokens=20, logit_bias={space: -100}))
    penalised = server.complete(KNOWN["prompt"], max_tokens=30, repetition_penalty=5.0, ignore_eos=True)
    assert len(set(text(penalised))) > len(set(KNOWN["answer"]))


def test_a_temperature_of_zero_and_a_top_k_of_one_agree(server):
    greedy = text(server.complete("zq", max_tokens=24, ignore_eos=True))
    assert text(server.complete(**RANDOM, top_k=1)) == greedy
    assert text(server.complete(**RANDOM, top_p=1e-6)) == greedy
    assert text(server.complete(**RANDOM, min_p=1.0)) == greedy
    assert text(server.complete(**RANDOM, seed=1)) != greedy


def test_a_prefix_is_cached_and_gives_the_same_answer(server):
    prompt = "copy: abcdefgh12345678abcdefgh ="
    first, second = (server.complete(prompt, max_tokens=40) for _ in range(2))
    assert text(first) == text(second) == " abcdefgh12345678abcdefgh"
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
    assert cached == [0, 16], "a block of 16 tokens of this prompt fits"


def test_metrics_count_tokens(server):
    before = server.metric("vllm:generation_tokens_total")
    generated = server.complete("zq", max_tokens=7, ignore_eos=True)["usage"]["completion_tokens"]
    assert generated == 7
    wait_until(lambda: server.metric("vllm:generation_tokens_total") == before + 7, "the tokens are counted")
