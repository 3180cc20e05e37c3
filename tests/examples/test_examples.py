"""The examples, run as their own text and the README say."""

import re
import shlex

import pytest
from processes import run
from readme import ROOT, block

ANSWERS = ["reverse: plugin = nigulp", "add: 12 + 34 = 46", "upper: kernel = KERNEL", "sort: 90210 = 00129"]


@pytest.mark.engine
def test_my_kernel_is_checked_and_serves_the_offline_example():
    finished = run("bash", "-ec", block("", "export PYTHONPATH="))
    assert finished.code == 0, finished.output
    assert re.search(r"\d+ passed, 0 failed", finished.output), finished.output
    for answer in ANSWERS:
        assert answer in finished.output, finished.output
    assert re.search(r"\bsilu_and_mul +mine +asked for by OPSET_KERNELS", finished.output), finished.output
    assert re.search(r"\brms_norm +(cpp|cpu) +first kernel for cpu", finished.output), finished.output


def test_the_examples_own_text_says_the_same():
    text = (ROOT / "examples" / "my_kernel.py").read_text()
    for line in block("", "export PYTHONPATH=").splitlines():
        assert line.partition("#")[0].rstrip() in text
    assert block("python", "@kernel(") in text


@pytest.mark.serve
def test_ask(server):
    finished = run("python", "examples/ask.py", "Write plugin backwards.", "--url", f"{server.http.base_url}/v1")
    assert finished.out.splitlines()[-1] == "nigulp", finished.output


@pytest.mark.serve
def test_the_readmes_request(server):
    """Sends the request to the server that the README's preceding line started; see `processes.serve_command`."""
    _, _, curl = block("", "vllm serve examples/tiny-qwen3 ").partition("\n")
    program, url, *options = shlex.split(curl)
    assert (program, url.partition("/")[0]) == ("curl", "localhost:8000")
    answer = server.post(f"/{url.partition('/')[2]}", options[options.index("-d") + 1])
    assert answer.json()["choices"][0]["text"] == " nigulp"
