"""Models that draft tokens change no answer, with vLLM's second model runner (`drafted.py` says what is emulated)."""

import json
import subprocess
import sys
from pathlib import Path

import drafting
import pytest
import torch
from processes import PATIENCE, environment

from vllm_opset.platform import second_runner

pytestmark = [
    pytest.mark.engine,
    pytest.mark.window,
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_features.py has these drafts on a GPU"),
    pytest.mark.skipif(
        not second_runner.replaces_triton_kernels(),
        reason="this vLLM has no hook for the runner's kernels: runs with 0.31 and later",
    ),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, dict]:
    variables = environment(TRITON_INTERPRET=1, CUDA_VISIBLE_DEVICES="", OPSET_PLATFORM="cpu")
    program = subprocess.run(
        [sys.executable, Path(__file__).with_name("drafted.py"), tmp_path_factory.mktemp("drafted")],
        env=variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert program.returncode == 0, program.stderr[-4000:]
    return json.loads(program.stdout.splitlines()[-1])


@pytest.mark.parametrize("method", drafting.METHODS)
def test_drafts_of_a_model_change_no_token(method, answers):
    answer = answers[method]
    assert answer["found"] == answer["expected"]
    assert answer["accepted"] >= drafting.ACCEPTED.get(method, 0)


@pytest.mark.skipif(
    not second_runner.draft_by.bridge.needed(), reason="this vLLM has no draft models: runs with 0.32 and later"
)
def test_graphs_of_a_draft_model_change_no_token(answers):
    """Three requests of unequal length end in one step, so the graphs for four of them replay, and none for fewer."""
    answer = answers["graphs"]
    assert answer["found"] == answer["expected"]
    assert answer["accepted"] >= drafting.ACCEPTED["draft_model"]
    assert set(answer["replays"]) == {"1", "5"}
    assert all(sizes["4"] for sizes in answer["replays"].values())
