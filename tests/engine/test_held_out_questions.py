"""The accuracy gate in the model's own dtype and quantised; tests/serve/test_accuracy.py runs it in float32."""

import shutil

import pytest
import quantised
from questions import HELD_OUT, MODEL, REQUIRED, grade
from vllm import SamplingParams

pytestmark = [pytest.mark.engine, pytest.mark.window]
SAMPLING = SamplingParams(temperature=0, max_tokens=64)
# The share that must be answered with weights that were rounded to nearest, which moves each by a part of a step.
REQUIRED_QUANTISED = 0.98


def wrong(tasks: list[dict], answers: list) -> list[tuple[str, str]]:
    """The questions that were not answered exactly, with the answers."""
    return [
        (answer.prompt, answer.outputs[0].text)
        for task, answer in zip(tasks, answers, strict=True)
        if not grade(task["answer"], answer.outputs[0].text)
    ]


def test_held_out_questions_are_answered_exactly_in_bfloat16(engine):
    with engine(MODEL, dtype="bfloat16", max_num_seqs=128) as llm:
        completions = llm.generate([task["completion"] for task in HELD_OUT], SAMPLING, use_tqdm=False)
        chats = llm.chat([task["messages"] for task in HELD_OUT], SAMPLING, use_tqdm=False)
    missed = wrong(HELD_OUT * 2, completions + chats)
    assert len(missed) <= (1 - REQUIRED) * 2 * len(HELD_OUT), missed


@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4"])
def test_held_out_questions_are_answered_with_quantised_weights(dtype, engine, tmp_path):
    folder, arguments = MODEL, {"quantization": "fp8"} if dtype == "fp8" else {}
    if dtype != "fp8":  # which vLLM quantises while it loads
        folder = shutil.copytree(MODEL, tmp_path, dirs_exist_ok=True)
    if dtype == "int8":
        quantised.round_to_int8(MODEL, folder)
    if dtype == "int4":
        quantised.round_to_int4(MODEL, folder, 32)
    with engine(folder, dtype="bfloat16", max_num_seqs=128, **arguments) as llm:
        answers = llm.generate([task["completion"] for task in HELD_OUT], SAMPLING, use_tqdm=False)
    missed = wrong(HELD_OUT, answers)
    assert len(missed) <= (1 - REQUIRED_QUANTISED) * len(HELD_OUT), missed
