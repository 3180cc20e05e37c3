"""`vllm serve` on the emulated NPU, in processes that find it as they would find a real one."""

import re

import emulated_npu
import pytest
from processes import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    server = Server(log, "--gpu-memory-utilization", "0.1", **emulated_npu.variables(), OPSET_PLATFORM="npu")
    try:
        yield server.wait_until_ready()
        assert server.stop() == 0, server.text()
    finally:
        server.kill()


def test_a_completion_and_a_chat_are_answered(server):
    answer = server.complete("count: 10 to 19 =", max_tokens=64)
    assert answer["choices"][0]["text"] == " 10 11 12 13 14 15 16 17 18 19"
    (choice,) = server.chat("Write plugin backwards.", max_tokens=64)["choices"]
    assert choice["message"]["content"] == "nigulp"


def test_seeded_choices_repeat(server):
    random = {"temperature": 1.5, "ignore_eos": True, "max_tokens": 24, "top_p": 0.9, "top_k": 40, "n": 3}
    first, second = (server.complete("zq", **random, seed=5)["choices"] for _ in range(2))
    assert [choice["text"] for choice in first] == [choice["text"] for choice in second]
    assert len({choice["text"] for choice in first}) == 3


def test_the_log_says_which_kernels_serve(server):
    text = server.text()
    assert "backend=hccl" in text
    assert re.search("reshape_and_cache +ascend", text)
