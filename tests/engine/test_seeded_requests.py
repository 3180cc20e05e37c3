"""Requests with a seed get the same tokens alone and together, in any order, in chunks and after preemption."""

import math
import sys

import models
import pytest
from engines import counter, is_first_runner, runner, served

pytestmark = [pytest.mark.engine, pytest.mark.window]

NUM_TOKENS = 32
LENGTHS = (150, 7, 40, 100, 77)
REQUESTS = (
    {"seed": 5, "temperature": 1.0},
    {"seed": 7, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0.0},
    {"seed": -9, "temperature": 1.2, "min_p": 0.02, "frequency_penalty": 0.2, "presence_penalty": 0.3},
    {"seed": 5, "temperature": 2.0, "top_p": 0.95, "n": 2},
)
ALL = range(len(REQUESTS))
# Most prompts take several steps. Draws before a prompt's last step are taken back.
IN_PIECES = {"max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    models.build("qwen3", folder)
    return folder


def answers(llm, order) -> list[list[tuple[int, ...]]]:
    """The answers to the requests of these numbers, asked together."""
    from vllm import SamplingParams

    prompts = models.prompts(LENGTHS)
    outputs = llm.generate(
        [{"prompt_token_ids": prompts[i]} for i in order],
        [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **REQUESTS[i]) for i in order],
        use_tqdm=False,
    )
    return [[tuple(completion.token_ids) for completion in output.outputs] for output in outputs]


def test_tokens_do_not_depend_on_the_batch(qwen, engine):
    with engine(qwen, **IN_PIECES) as llm:
        together = answers(llm, ALL)
        order = [4, 2, 0, 3, 1]
        assert answers(llm, order) == [together[i] for i in order]
        assert [answers(llm, [i])[0] for i in ALL] == together
        ran, penalises = served(llm), {"apply_penalties"} if is_first_runner(llm) else set()
    first, second = together[4]
    assert first != second, "two completions of one request are the same"
    assert ran.keys() >= {"top_k_top_p_sample"} | penalises


def test_tokens_do_not_depend_on_preemption(qwen, engine):
    with engine(qwen, num_gpu_blocks_override=40, **IN_PIECES) as llm:
        alone = [answers(llm, [i])[0] for i in ALL]
        assert counter(llm, "num_preemptions") == 0
        order = [*ALL] * 4
        assert answers(llm, order) == [alone[i] for i in order]
        assert counter(llm, "num_preemptions") > 0


def test_every_draw_of_a_request_has_a_key_of_its_own(qwen, engine, monkeypatch):
    keys = []
    with engine(qwen, **IN_PIECES) as llm:
        sampler, first = sys.modules[type(runner(llm).sampler).__module__], is_first_runner(llm)
        draw = sampler.draw_keys

        def recorded(*args):
            keys.append(draw(*args))
            return keys[-1]

        monkeypatch.setattr(sampler, "draw_keys", recorded)
        answers(llm, [0])
    (drawn,) = zip(*(key.tolist() for key in keys), strict=True)
    steps = math.ceil(LENGTHS[0] / IN_PIECES["max_num_batched_tokens"])
    prompt, tokens = drawn[: steps - 1], drawn[steps - 1 :]
    # The first runner takes the draws of a prompt's parts back, and the second one numbers draws by their tokens.
    assert set(prompt) == {tokens[0]} if first else not set(prompt) & set(tokens)
    assert len(set(tokens)) == len(tokens) >= NUM_TOKENS
