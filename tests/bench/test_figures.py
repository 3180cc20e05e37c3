"""The figures of benchmarks, counted by hand: times, rates, ratios, and the order in which engines take turns."""

import copy
import io
import json
import runpy
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from readme import ROOT
from typer.testing import CliRunner

from vllm_opset.bench import ceilings, engines, shapes, timing
from vllm_opset.bench.cases import Batch
from vllm_opset.bench.compare import ComparisonPlan
from vllm_opset.bench.compare_report import Report, record
from vllm_opset.bench.engines import engine_process
from vllm_opset.bench.figures import Run
from vllm_opset.bench.format import TIMES
from vllm_opset.targets import Target, instead

NOTHING_STARTED = json.dumps({"versions": {}, "platform": "none", "device": None, "compiled": []})
# An engine that computes for so many seconds for each answer.
WORKING = f"""
import json, os, sys, time
print({NOTHING_STARTED!r}, flush=True)
for line in sys.stdin:
    end = time.process_time() + float(os.environ.get("BUSY", 0))
    while time.process_time() < end:
        pass
    tokens = [[0]] * len(json.loads(line)["prompts"])
    print(json.dumps(dict(seconds=1, tokens=tokens, steps=2, compiled=[], peak_bytes=0)), flush=True)
"""


@pytest.fixture
def working(tmp_path, monkeypatch) -> None:
    """Engines compute nothing, for as long as their variable says."""
    child = tmp_path / "child.py"
    child.write_text(WORKING)
    monkeypatch.setattr(engines, "CHILD", child)


def test_a_time_is_the_median_with_half_the_distance_of_the_quartiles():
    assert timing._summary([70, 1, 2, 3, 6, 4, 5]) == timing.Timing(median=4, spread=2)


def test_ceilings_are_bytes_and_flop_in_a_second(monkeypatch):
    """A read takes half a second here, and a product too."""
    monkeypatch.setattr(ceilings, "time_call", lambda *_: timing.Timing(0.5, 0))
    monkeypatch.setitem(ceilings.READ_BYTES, "cpu", 4096)
    monkeypatch.setitem(ceilings.MATMUL_SIZE, "cpu", 10)
    assert ceilings.measure("cpu", torch.float32) == ceilings.Ceilings(8192, 4000, torch.float32)


@pytest.mark.parametrize(("architecture", "fp8_rate"), [("sm80", None), ("sm89", 16384)])
def test_the_rate_of_fp8_is_measured_where_the_target_has_it(architecture, fp8_rate, monkeypatch):
    """The calls run here, and are taken to last half a second."""

    def called(run, call, device):
        args, kwargs = copy.deepcopy(call)  # as `time_call` does
        run(*args, **kwargs)
        return timing.Timing(0.5, 0)

    monkeypatch.setattr(ceilings, "time_call", called)
    monkeypatch.setitem(ceilings.READ_BYTES, "cpu", 4096)
    monkeypatch.setitem(ceilings.MATMUL_SIZE, "cpu", 16)
    with instead(Target("nvidia", architecture)):
        measured = ceilings.measure("cpu", torch.bfloat16)
    assert measured == ceilings.Ceilings(8192, 16384, torch.bfloat16, fp8_rate)


def test_the_figures_of_a_case():
    """Two requests of four tokens each, which take a second to the first one and three to the others."""
    metrics = Batch(batch=2, prompt=8, output=4).metrics([Run(1.0, 4.0, [], steps=6)])
    assert metrics == {
        "TTFT, s": [1], "TPOT, ms": [1000], "output tokens/s": [2], "mean acceptance length": [1.5]
    }  # fmt: skip


def test_steps_that_give_a_request_tokens_are_counted_whatever_their_number():
    found = [SimpleNamespace(new_token_ids=ids) for ids in ([5, 6, 7], [], [8])]
    core = SimpleNamespace(get_output=lambda: SimpleNamespace(outputs=found))
    steps = engine_process.Steps(core)
    assert core.get_output().outputs is core.get_output().outputs and steps.count == 4


def test_the_seconds_of_an_answer_are_those_of_the_generation(monkeypatch):
    """By a clock that a generation puts forward by three seconds, and all else by ten."""
    clock = iter((10.0, 13.0, 23.0))
    monkeypatch.setattr(engine_process, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    core = SimpleNamespace(get_output=None)
    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(engine_core=core),
        collective_rpc=lambda method: [{"device": None, "compiled": [], "peak_bytes": 5}],
        generate=lambda *_, **__: [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(7, 8))])],
    )
    vllm = SimpleNamespace(LLM=lambda **_: llm, SamplingParams=dict, __version__="0")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=None))
    request = {"prompts": [[1, 2]], "sampling": [{"max_tokens": 2}]}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request) + "\n"))
    engine_process.serve({}, answers := io.StringIO())
    _, answer = map(json.loads, answers.getvalue().splitlines())
    assert answer == {"seconds": 3.0, "tokens": [[7, 8]], "steps": 0, "compiled": [], "peak_bytes": 5}


def test_the_cpu_time_of_an_answer_is_its_own(working, tmp_path):
    busy = engines.Engine("working", env={"BUSY": "0.3"})
    with engines.RunningEngine(busy, {}, tmp_path) as engine, engine.awake():
        spent = [engine.ask([]).cpu_seconds for _ in range(2)]
    assert all(0.27 < seconds < 0.45 for seconds in spent)


def test_the_order_of_the_engines_alternates(working, tmp_path):
    steps, shape = [], shapes.load("tiny")
    compared = [engines.Engine("one"), engines.Engine("other")]
    ComparisonPlan(shape, shape.cases[:1], compared, repetitions=2, cold=False).run(tmp_path, tmp_path, steps.append)
    turns = [step.rpartition(": ")[2] for step in steps if ", run " in step]
    assert turns == ["one", "other", "other", "one", "one", "other"]


def test_runs_that_all_engines_had_done_before_an_interruption_are_reported(working, tmp_path):
    def interrupt(step: str) -> None:
        if step.endswith("run 3 of 5: one"):  # the other engine comes first
            raise KeyboardInterrupt

    shape = shapes.load("tiny")
    compared = [engines.Engine("one"), engines.Engine("other")]
    plan = ComparisonPlan(shape, shape.cases[:2], compared, repetitions=5, cold=False)
    found = plan.run(tmp_path, tmp_path, interrupt)
    assert [(result.engine, len(result.runs)) for result in found.results] == [("one", 2), ("other", 2)]
    report = Report(record(plan, found, "the command"))
    assert not report.is_complete
    assert report.legend().endswith("Interrupted before 8x64/32. 1x64/32 has 2 runs alone.")


def test_two_checkouts_are_compared_with_the_first_one(monkeypatch, tmp_path):
    """The other checkout takes 4 µs, and this one 6."""
    script = runpy.run_path(str(ROOT / "benchmarks" / "two_checkouts.py"))
    key, seconds = ("relu2", "cpu", "T1"), {tmp_path: 4e-6, ROOT: 6e-6}

    class Checkout:
        keys = (key,)

        def __init__(self, root) -> None:
            self.seconds = lambda _: seconds[root]

    @contextmanager
    def checkouts(roots, *_):
        yield [*map(Checkout, roots)]

    monkeypatch.setitem(script["main"].__globals__, "checkouts", checkouts)
    monkeypatch.setitem(script["main"].__globals__, "supported", lambda *_: [key])
    app, kept = script["typer"].Typer(), tmp_path / "times.json"
    app.command()(script["main"])
    result = CliRunner().invoke(app, [str(tmp_path), "--device", "cpu", "--json", str(kept)], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    assert json.loads(kept.read_text()) == [[*key, 4e-6, 6e-6, 4e-6]]
    assert f"Geometric mean of 1 cases: 1.500{TIMES}" in result.output
    assert f"Before again: from 1.000{TIMES} to 1.000{TIMES}" in result.output
