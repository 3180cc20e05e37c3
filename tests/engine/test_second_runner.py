"""vLLM's second model runner on a CPU, without Triton, gives the answers of the first one."""

import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import models
import pytest
import torch
from engines import NUM_TOKENS, generate, is_first_runner, runner, tokens
from processes import run

from vllm_opset.platform import runners, second_runner

pytestmark = [
    pytest.mark.engine,
    pytest.mark.window,
    pytest.mark.skipif(torch.cuda.is_available(), reason="of the platform for a CPU: runs where there is no GPU"),
    pytest.mark.skipif(
        not second_runner.replaces_triton_kernels(),
        reason="this vLLM has no hook for the runner's kernels: runs with 0.31 and later",
    ),
]

# A prompt takes several steps, and the cache cannot hold all requests at once.
LIMITS = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 40, "max_logprobs": -1}
SAMPLED = {"temperature": 1.5, "seed": 11}
REQUESTS = {
    "greedy": {},
    "several answers": {**SAMPLED, "n": 3, "top_k": 40, "top_p": 0.9},
    "min-p": {**SAMPLED, "min_p": 0.05},
    "penalties": {**SAMPLED, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.2},
    "bias": {"logit_bias": {5: 20.0, 6: -100.0}, **SAMPLED},
    "allowed tokens": {"allowed_token_ids": [10, 20, 30], **SAMPLED},
    "at least": {"min_tokens": 20, "stop_token_ids": list(range(3, 100)), "ignore_eos": False},
    "bad words": {"bad_words": ["a", "b", "c d"], **SAMPLED},
}
MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
# Raw and processed logits differ. The filter keeps token 7 and takes others away, whose processed logits are -inf.
PROCESSED = {**SAMPLED, "logit_bias": {7: 9.0}, "repetition_penalty": 1.3, "top_k": 20}
# Requests for log-probabilities.
SCORED = {
    "greedy": {"logprobs": 3},
    "sampled": {**SAMPLED, "logprobs": 5, "prompt_logprobs": 3},
    "processed": {**PROCESSED, "logprobs": 5},
    "of these tokens": {"logprob_token_ids": [7, 9, 11]},
    "of these tokens, processed": {**PROCESSED, "logprob_token_ids": [7, 9, 11]},
}
# The second runner has room for 128, and vLLM adds the tokenizer's own end.
TOO_MANY = {"min_tokens": 2, "stop_token_ids": list(range(3, 131))}
WITHOUT_FIRST = Path(__file__).with_name("without_first_runner.py")
STRUCTURED = {"regex": r"[a-f]{4}-\d{3}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    models.build("qwen3", folder)
    models.add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def answers(folder, engine) -> dict[str, dict[str, list]]:
    """The outputs of both runners for the same requests, by the module of the runner."""
    from vllm.sampling_params import StructuredOutputsParams

    structured = {"structured_outputs": StructuredOutputsParams(**STRUCTURED), "ignore_eos": False, **SAMPLED}
    found = {}
    for variable in "01":
        with serving(folder, engine, variable) as llm:
            if not is_first_runner(llm):
                assert_a_bad_request_is_refused(llm)
            found[type(runner(llm)).__module__] = asked(llm, REQUESTS | {"structured": structured})
    return found


@pytest.fixture(scope="module")
def scores(folder, engine) -> dict[str, list[dict[str, list]]]:
    """The outputs of the first and of the second runner, by the mode of their log-probabilities."""
    found = {mode: [] for mode in MODES}
    for mode, variable in itertools.product(MODES, "01"):
        with serving(folder, engine, variable, logprobs_mode=mode) as llm:
            found[mode].append(asked(llm, SCORED, max_tokens=8))
    return found


@contextmanager
def serving(folder, engine, variable: str, **arguments) -> Iterator:
    """An engine with the model runner that this value of vLLM's variable selects."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(runners.VARIABLE, variable)
        with engine(folder, **LIMITS, **arguments) as llm:
            yield llm


def asked(llm, requests: dict[str, dict], max_tokens: int = NUM_TOKENS) -> dict[str, list]:
    """The outputs of an engine, by the names of the requests."""
    prompts = models.prompts() * 2
    return {name: generate(llm, prompts, max_tokens=max_tokens, **sampling) for name, sampling in requests.items()}


def assert_a_bad_request_is_refused(llm) -> None:
    """It does not reach the engine, which answers the fixture's requests afterwards."""
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=r"stop tokens with min_tokens, .* has room for 128: give fewer"):
        generate(llm, models.prompts()[:1], **TOO_MANY)


def test_each_runner_is_a_class_of_its_own(answers):
    assert list(answers) == ["vllm_opset.platform.v1.cpu_runner", "vllm_opset.platform.cpu.runner"]


@pytest.mark.parametrize("name", [*REQUESTS, "structured"])
def test_both_runners_give_the_same_answers(name, answers):
    first, second = (outputs[name] for outputs in answers.values())
    assert tokens(second) == tokens(first)
    for one, other in zip(first, second, strict=True):
        assert [answer.finish_reason for answer in other.outputs] == [answer.finish_reason for answer in one.outputs]
        assert [answer.token_ids for answer in other.outputs] == [answer.token_ids for answer in one.outputs]


@pytest.mark.parametrize("name", SCORED)
@pytest.mark.parametrize("mode", MODES)
def test_both_runners_give_the_same_log_probabilities(mode, name, scores):
    first, second = (outputs[name] for outputs in scores[mode])
    assert tokens(second) == tokens(first)
    for one, other in zip(first, second, strict=True):
        of_one, of_other = map(log_probabilities, (one, other))
        assert len(of_one) == len(of_other) > 0
        for step, expected in zip(of_other, of_one, strict=True):
            assert {id: given.rank for id, given in step.items()} == {id: given.rank for id, given in expected.items()}
            values = ([step[id].logprob for id in sorted(step)] for step in (step, expected))
            torch.testing.assert_close(*map(torch.tensor, values), rtol=1e-4, atol=1e-4)


def test_no_two_modes_give_the_same(scores):
    first_steps = [second["processed"][0].outputs[0].logprobs[0] for _, second in scores.values()]
    assert len({max(given.logprob for given in step.values()) for step in first_steps}) == len(MODES)


def log_probabilities(output) -> list[dict]:
    """Those of each step of a prompt that has them, and of its first answer."""
    return [*(output.prompt_logprobs or [])[1:], *output.outputs[0].logprobs]


def test_the_second_runner_serves_without_the_first_one(tmp_path):
    """The day that vLLM removes its first model runner, `platform/v1` can go, and nothing breaks on a CPU.

    The same holds for vLLM's IR. Nor does the engine need Triton.
    """
    models.build("qwen3", tmp_path)
    program = run(sys.executable, WITHOUT_FIRST, tmp_path, "triton", OPSET_PLATFORM="cpu")
    assert program.code == 0, program.output[-4000:]
    found = json.loads(program.out.splitlines()[-1])
    answers = found["answers"]
    assert len(answers) == len(models.LENGTHS) and {len(answer) for answer in answers} == {NUM_TOKENS}
    assert {"rms_norm", "fused_add_rms_norm", "paged_attention", "top_k_top_p_sample"} <= set(found["ops"])
