"""benchmarks/engine_comparisons.py: comparisons of whole engines, one after the other."""

import importlib.util
import sys
from itertools import pairwise

import pytest
import typer
import yaml
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
    assert comparisons.run("qwen-8b", tmp_path, 2, 1, "") == end
