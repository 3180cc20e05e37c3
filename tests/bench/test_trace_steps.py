"""benchmarks/trace_steps.py: the sums of steps by kind, and those of an engine on a CPU, which has no GPU's times."""

import json
import runpy

import pytest
from readme import ROOT
from vllm import envs

from vllm_opset.bench import shapes
from vllm_opset.bench.cases import Trace

FOLDER = ROOT / "benchmarks"
SCRIPT = runpy.run_path(str(FOLDER / "trace_steps.py"), run_name="trace_steps")
Step = SCRIPT["Step"]


def test_steps_are_summed_by_kind():
    steps = [
        Step(8, 8, 2.0, 1.0, 0.5),
        Step(9, 8, 3.0, 1.5, 0.25),
        Step(512, 3, 1.0, 0.5, 0.5),
        Step(513, 3, 1.0, 0.5, 0.5),
        Step(4097, 3, 4.0, 2.0, 3.0),
    ]
    sums = {kind: [*SCRIPT["summary"](found).values()] for kind, found in SCRIPT["by_kind"](steps)}
    assert sums == {
        "one token of each request": [1, 8, 2.0, 1.0, 0.5],
        "up to 512 tokens": [2, 521, 4.0, 2.0, 0.75],
        "up to 2,048 tokens": [1, 513, 1.0, 0.5, 0.5],
        "more than 4,096 tokens": [1, 4097, 4.0, 2.0, 3.0],
    }


@pytest.mark.engine
def test_all_steps_of_a_trace_are_noted(tmp_path, monkeypatch):
    monkeypatch.setenv("OPSET_PLATFORM", "cpu")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.syspath_prepend(str(FOLDER))  # the engine imports the worker's mixin from there
    try:
        SCRIPT["main"]("tiny", 1, "{}", tmp_path / "steps.json")
    finally:
        envs.disable_envs_cache()  # an engine in this process fills it, and later tests set variables
    (run,) = json.loads((tmp_path / "steps.json").read_text())["runs"]
    kinds = [sums for kind, sums in run.items() if kind != "seconds"]
    (trace,) = (case for case in shapes.load("tiny").cases if isinstance(case, Trace))
    _, requests = trace.rounds(1000)
    # A request's last token is in no further step.
    assert sum(sums["tokens"] for sums in kinds) == sum(len(one.prompt) + one.max_tokens - 1 for one in requests)
    assert run["seconds"] > sum(sums["lasted, s"] for sums in kinds) > 0
    assert all(sums["lasted, s"] > sums["Python, s"] / 2 > 0 == sums["GPU, s"] for sums in kinds)
