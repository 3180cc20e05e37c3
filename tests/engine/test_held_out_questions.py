"""The accuracy gate in the model's own dtype; tests/serve/test_accuracy.py runs it in float32, over HTTP."""

import pytest
from questions import HELD_OUT, MODEL, REQUIRED, grade
from vllm import SamplingParams

pytestmark = [pytest.mark.engine, pytest.mark.window]


def test_held_out_questions_are_answered_exactly_in_bfloat16(engine):
    sampling = SamplingParams(temperature=0, max_tokens=64)
    with engine(MODEL, dtype="bfloat16", max_num_seqs=128) as llm:
        completions = llm.generate([task["completion"] for task in HELD_OUT], sampling, use_tqdm=False)
        chats = llm.chat([task["messages"] for task in HELD_OUT], sampling, use_tqdm=False)
    answers = zip(HELD_OUT * 2, completions + chats, strict=True)
    wrong = [
        (answer.prompt, answer.outputs[0].text)
        for task, answer in answers
        if not grade(task["answer"], answer.outputs[0].text)
    ]
    assert len(wrong) <= (1 - REQUIRED) * 2 * len(HELD_OUT), wrong
