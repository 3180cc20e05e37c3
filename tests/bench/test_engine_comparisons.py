"""benchmarks/engine_comparisons.py: comparisons of whole engines, one after the other on each GPU."""

import importlib.util
import json
import os
import sys
from itertools import pairwise

import psutil
import pytest
import typer
import yaml
from processes import wait_until
from readme import ROOT
from typer.testing import CliRunner

from vllm_opset.cli.e2e import _plan

SCRIPT = ROOT / "benchmarks" / "engine_comparisons.py"
spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
comparisons = importlib.util.module_from_spec(spec)
spec.loader.exec_module(comparisons)
NAMES = list(yaml.safe_load(comparisons.TABLE.read_text())["comparisons"])


def of(options: list[str], name: str) -> list[str]:
    return [value for option, value in pairwise(options) if option == name]


@pytest.mark.parametrize("name", NAMES)
def test_every_comparison_is_one_that_bench_e2e_takes(name):
    options = comparisons.options(name)
    (model,) = of(options, "--model")
    how = ["--cold" in options, "--apart" in options, "--at-once" in options]
    plan = _plan(model, of(options, "--case"), None, of(options, "--variant"), 2, *how)
    names = [engine.name for engine in plan.engines]
    assert names[0] == "opset" and names[-1] in ("opset", "stock", "moe", "attention") and plan.cases
    samples_with_flashinfer = name == "flashinfer-sampler"
    for engine in plan.engines:
        assert engine.env.get("VLLM_USE_FLASHINFER_SAMPLER") == (None if samples_with_flashinfer else "0")
        # Every engine of a comparison takes all requests of its largest case at once.
        assert engine.args["max_num_seqs"] == (64 if name == "gpt-oss-parts" else 256)


def test_named_cases_replace_those_of_the_table():
    assert of(comparisons.options("gpt-oss", ["64x*"]), "--case") == ["64x*"]


def test_an_unknown_comparison_is_an_error_that_names_the_nearest(tmp_path):
    app = typer.Typer()
    app.command()(comparisons.main)
    result = CliRunner().invoke(app, ["qwen-8", "--folder", str(tmp_path / "results")])
    assert result.exit_code == 2 and "qwen-8b" in result.output and not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("script", "end"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("import signal; signal.signal(15, lambda *_: exit(1)); signal.pause()", "ended at its limit, exit code 1"),
        ("import signal; signal.signal(15, signal.SIG_IGN); signal.pause()", "killed 1 s after its limit"),
    ],
    ids=["ends", "ends when it is asked", "hangs"],
)
def test_a_comparison_ends_at_its_limit_and_may_report_first(script, end, monkeypatch, tmp_path):
    started = comparisons.subprocess.Popen
    monkeypatch.setattr(comparisons, "GRACE", 1)
    monkeypatch.setattr(
        comparisons.subprocess, "Popen", lambda command, **files: started([sys.executable, "-c", script], **files)
    )
    assert comparisons.run("qwen-8b", tmp_path, 2, 1, "", (), *comparisons.places(()), []) == end


# A comparison that hangs while one of its engines is stopped.
HANGS = """
import os, pathlib, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
engine = [sys.executable, "-c", "import signal; signal.pause()", sys.argv[1]]
os.kill(subprocess.Popen(engine, start_new_session=True).pid, signal.SIGSTOP)
pathlib.Path(sys.argv[1]).touch()
signal.pause()
"""


def test_a_comparison_that_is_killed_leaves_no_engine(monkeypatch, tmp_path):
    started, begun = comparisons.subprocess.Popen, tmp_path / "begun"
    command = [sys.executable, "-c", HANGS, str(begun)]
    monkeypatch.setattr(comparisons, "GRACE", 1)
    monkeypatch.setattr(comparisons.subprocess, "Popen", lambda _, **files: started(command, **files))
    assert comparisons.run("qwen-8b", tmp_path, 2, 1, "", (), *comparisons.places(()), []).startswith("killed")
    assert begun.exists()
    wait_until(lambda: not of_argument(str(begun)), "all have ended")


def of_argument(word: str) -> list[psutil.Process]:
    """The processes with this word in their command line."""
    return [one for one in psutil.process_iter(["cmdline"]) if word in (one.info["cmdline"] or ())]


def test_comparisons_that_are_not_complete_are_an_error(monkeypatch, tmp_path):
    ends = iter(["exit code 0", "ended at its limit, exit code 1", "exit code 0"])
    monkeypatch.setattr(comparisons, "run", lambda *_: next(ends))
    app = typer.Typer()
    app.command()(comparisons.main)
    words = ["--folder", str(tmp_path)]
    result = CliRunner().invoke(app, ["qwen-8b", "llama-8b", *words])
    assert result.exit_code == 1 and "ended at its limit" in result.output
    assert CliRunner().invoke(app, ["qwen-8b", *words]).exit_code == 0


SIDE_BY_SIDE = """
import json, os, pathlib, sys, time
name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
(folder / f"{name}.began").touch()
deadline = time.monotonic() + 20
while len(list(folder.glob("*.began"))) < 2 and time.monotonic() < deadline:
    time.sleep(0.01)
found = [os.environ["CUDA_VISIBLE_DEVICES"], sorted(os.sched_getaffinity(0)), len(list(folder.glob("*.began")))]
(folder / name).write_text(json.dumps(found))
"""


def test_several_gpus_run_comparisons_side_by_side_with_cores_of_their_own(monkeypatch, tmp_path):
    started = comparisons.subprocess.Popen

    def start(command, **files):
        name = of(command, "--model")[0]
        return started([sys.executable, "-c", SIDE_BY_SIDE, name, str(tmp_path)], **files)

    monkeypatch.setattr(comparisons.subprocess, "Popen", start)
    app = typer.Typer()
    app.command()(comparisons.main)
    gpus = ["--gpu", "0", "--gpu", "3", "--folder", str(tmp_path)]
    result = CliRunner().invoke(app, ["qwen-8b", "llama-8b", *gpus])
    assert result.exit_code == 0 and result.output.count("exit code 0") == 2
    one, other = (json.loads((tmp_path / model).read_text()) for model in ("qwen3-8b", "llama-3.1-8b"))
    assert {one[0], other[0]} == {"0", "3"} and one[2] == other[2] == 2, "one ran after the other"
    if len(os.sched_getaffinity(0)) > 1:
        assert one[1] and other[1] and not set(one[1]) & set(other[1])
