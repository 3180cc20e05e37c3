"""Recorded decode steps on a CPU give the answers of the model's own code."""

import models
import pytest
import torch
from engines import generate, runner, tokens

from vllm_opset.kernel import kernels_of
from vllm_opset.platform.cpu import recorded_steps

pytestmark = [
    pytest.mark.engine,
    pytest.mark.window,
    pytest.mark.skipif(torch.cuda.is_available(), reason="of CPUs: runs on a machine without a GPU"),
    pytest.mark.skipif("cpp" not in kernels_of("rms_norm"), reason="of C++ kernels: runs with g++ 12 or newer"),
]


def answers(llm) -> list[list[list[int]]]:
    """Greedy answers, twice, and then sampled ones.

    They end one after the other. So steps have all numbers of requests.
    """
    from vllm import SamplingParams

    found, asked = [], [{"prompt_token_ids": prompt} for prompt in models.prompts()]
    for sampling in ({"temperature": 0}, {"temperature": 0}, {"temperature": 1, "seed": 5}):
        parameters = [
            SamplingParams(max_tokens=8 * (1 + number), ignore_eos=True, **sampling) for number in range(len(asked))
        ]
        found.append(tokens(llm.generate(asked, parameters, use_tqdm=False)))
    return found


def steps_of(llm) -> recorded_steps.RecordedSteps | None:
    """None if the model's steps are not recorded."""
    forward = runner(llm).get_model().forward
    return forward if isinstance(forward, recorded_steps.RecordedSteps) else None


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "qwen2_moe", "gpt_oss"])
def test_recorded_steps_give_the_same_answers(name, engine, tmp_path):
    """A window in every other layer, shared experts, sinks."""
    models.build(name, tmp_path)
    with engine(tmp_path, enforce_eager=True) as llm:
        assert steps_of(llm) is None
        expected = answers(llm)
    with engine(tmp_path) as llm:
        assert answers(llm) == expected
        steps = steps_of(llm)
        assert steps.replayed > 40 and None not in steps._recordings.values()


def test_steps_with_kernels_of_pytorch_are_not_recorded(engine, tmp_path):
    """In fp16, attention makes a plan in Python from the lengths of requests."""
    models.build("qwen3", tmp_path)
    with engine(tmp_path, dtype="float16") as llm:
        generate(llm, models.prompts()[:2], max_tokens=8)
        steps = steps_of(llm)
        assert steps.replayed == 0 and set(steps._recordings.values()) == {None}


def test_a_recording_that_differs_is_dropped(engine, tmp_path, monkeypatch):
    models.build("qwen3", tmp_path)
    with engine(tmp_path) as llm:
        expected = tokens(generate(llm, models.prompts()[:2], max_tokens=8))
        steps = steps_of(llm)
        steps.forget()
        replay = recorded_steps.Recording.replay

        def wrong(recording) -> bool:
            replay(recording)
            recording.results[-1].add_(1)
            return True

        monkeypatch.setattr(recorded_steps.Recording, "replay", wrong)
        before = steps.replayed
        assert tokens(generate(llm, models.prompts()[:2], max_tokens=8)) == expected
        assert steps.replayed == before and set(steps._recordings.values()) == {None}
