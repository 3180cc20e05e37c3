"""The accuracy gate: the model knows its held-out questions, and must answer them through the engine."""

import json
import signal

import pytest
from processes import Server
from questions import HELD_OUT, REQUIRED, grade
from streams import all_at_once, chat, complete

pytestmark = pytest.mark.serve

# A kernel that uses the wrong half as the gate. (The model is robust: 1.5 times the right values do not mislead it.)
WRONG = """
from vllm_opset import ops
from vllm_opset.kernel import kernel

@kernel(ops.silu_and_mul, name="wrong")
def silu_and_mul(x):
    return ops.mul_and_silu(x)
"""


async def ask_both_ways(http, task: dict) -> list[tuple[str, str]]:
    """(form, answer), as a completion and as a chat."""
    completion = await complete(http, prompt=task["completion"], max_tokens=64)
    return [("completion", completion), ("chat", await chat(http, task["messages"], max_tokens=64))]


def share_of_right_answers(server: Server, tasks: list[dict]) -> tuple[float, list[str]]:
    """The share of right answers, and the wrong ones."""
    answers = all_at_once(server, ask_both_ways, tasks)
    wrong = [
        f"{form} {task['messages'][-1]['content']!r}: {answer!r}, not {task['answer']!r}"
        for task, both in zip(tasks, answers, strict=True)
        for form, answer in both
        if not grade(task["answer"], answer)
    ]
    return 1 - len(wrong) / (2 * len(tasks)), wrong


@pytest.mark.window
def test_held_out_questions_are_answered_exactly(server):
    share, wrong = share_of_right_answers(server, HELD_OUT)
    assert share >= REQUIRED, f"{share:.2%} right\n" + "\n".join(wrong)


def test_the_gate_closes_on_a_wrong_kernel_and_ctrl_c_ends_the_server(tmp_path):
    """The first shows that the served tokens come from the selected kernels.

    The terminal interrupts every process of the group. Both are one test, because a server takes half a minute.
    """
    (tmp_path / "wrong_kernel.py").write_text(WRONG)
    override = {"opset": {"kernels": {"silu_and_mul": "wrong"}}}
    server = Server(
        tmp_path / "log",
        "--additional-config",
        json.dumps(override),
        PYTHONPATH=tmp_path,
        OPSET_IMPORT="wrong_kernel",
    )
    try:
        server.wait_until_ready()
        share, _ = share_of_right_answers(server, HELD_OUT[:40])
        assert share < REQUIRED
        assert "asked for by --additional-config" in server.text()
        server.assert_ended_well(server.stop(signal.SIGINT, everyone=True))
    finally:
        server.kill()
