"""Drafts by n-grams on a CPU, without Triton, change no greedy answer, are accepted, and keep to seeds."""

from collections.abc import Mapping
from typing import NamedTuple

import models
import pytest
import torch
from engines import counter, generate, tokens

from vllm_opset.platform import second_runner

pytestmark = [
    pytest.mark.engine,
    pytest.mark.window,
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_features.py has n-gram drafts on a GPU"),
    pytest.mark.skipif(
        not second_runner.drafts_without_triton(),
        reason="this vLLM has no n-gram drafts with its second model runner: runs with 0.32 and later",
    ),
]

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
REGEX = r"[a-f]{4}-\d{3}"
GREEDY = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "at least": {"min_tokens": 20, "stop_token_ids": list(range(3, 100)), "ignore_eos": False},
    "bad words": {"bad_words": ["a", "b", "c d"]},
    "structured": {"structured_outputs": {"regex": REGEX}, "ignore_eos": False},
    "scored": {"logprobs": 3, "prompt_logprobs": 2},
}
SAMPLED = {"temperature": 1.0, "top_k": 40, "top_p": 0.9}
# Prompts take several steps, and the cache cannot hold all requests at once.
NARROW = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 40}


BLOCK_SIZE = 16


def prompts() -> list[list[int]]:
    """Some repeat themselves. If one is asked again, all of it but one token is cached, and vLLM drafts no token."""
    return [*models.prompts(), [7, 8, 9, 10] * 10, [5, 6, 7] * 9, [11] * (BLOCK_SIZE + 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    models.build("qwen3", folder)
    models.add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def plain(folder, engine) -> dict[str, list]:
    """The answers of an engine without drafts."""
    with engine(folder) as llm:
        return asked(llm)


class Drafted(NamedTuple):
    """The answers of an engine with drafts, and its mean acceptance length where one token alone may follow."""

    answers: dict[str, list]
    accepted: float


@pytest.fixture(scope="module")
def drafted(folder, engine, plain) -> Drafted:  # one engine at a time lives in this process
    with engine(folder, speculative_config=DRAFTS, block_size=BLOCK_SIZE) as llm:
        answers, before = asked(llm), _counted(llm)
        generate(llm, [[10] * 8], allowed_token_ids=[10], max_tokens=100)
        accepted, steps = (now - was for now, was in zip(_counted(llm), before, strict=True))
    return Drafted(answers, 1 + accepted / steps)


def _counted(llm) -> list[int]:
    return [counter(llm, f"spec_decode_num_{what}") for what in ("accepted_tokens", "drafts")]


def asked(llm) -> dict[str, list]:
    from vllm.sampling_params import StructuredOutputsParams

    def parameters(sampling: Mapping) -> dict:
        structured = sampling.get("structured_outputs")
        return {**sampling, "structured_outputs": structured and StructuredOutputsParams(**structured)}

    return {name: generate(llm, prompts(), **parameters(sampling)) for name, sampling in GREEDY.items()}


@pytest.mark.parametrize("name", GREEDY)
def test_drafts_change_no_greedy_answer(name, plain, drafted):
    assert tokens(drafted.answers[name]) == tokens(plain[name])


def test_drafts_change_no_log_probability(plain, drafted):
    for one, other in zip(plain["scored"], drafted.answers["scored"], strict=True):
        for expected, found in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert {id: given.rank for id, given in found.items()} == {id: given.rank for id, given in expected.items()}
            values = [[given[id].logprob for id in sorted(expected)] for given in (found, expected)]
            torch.testing.assert_close(*map(torch.tensor, values), rtol=1e-4, atol=1e-4)


def test_drafts_of_repeated_tokens_are_accepted(drafted):
    assert drafted.accepted == DRAFTS["num_speculative_tokens"] + 1


def test_drafts_survive_preemption_and_prompts_in_pieces(folder, engine, plain):
    with engine(folder, speculative_config=DRAFTS, **NARROW) as llm:
        assert tokens(generate(llm, prompts() * 2)) == tokens(plain["plain"]) * 2
        assert counter(llm, "num_preemptions") > 0


def test_seeded_requests_draw_the_same_in_any_batch(folder, engine):
    """Later requests begin while others verify drafts."""
    with engine(folder, speculative_config=DRAFTS, max_num_seqs=3) as llm:
        together = tokens(generate(llm, prompts(), seed=11, **SAMPLED))
        assert [tokens(generate(llm, [prompt], seed=11, **SAMPLED))[0] for prompt in prompts()] == together
        assert tokens(generate(llm, prompts(), seed=12, **SAMPLED)) != together
        several = generate(llm, prompts()[:1], seed=11, n=3, **SAMPLED)[0].outputs
    assert len({tuple(answer.token_ids) for answer in several}) == 3
