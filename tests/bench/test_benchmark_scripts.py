"""What the scripts of benchmarks/ refuse before they measure anything."""

import runpy

import pytest
import typer
from readme import ROOT
from typer.testing import CliRunner

FOLDER = ROOT / "benchmarks"
NOWHERE = ("--json", "/no/such/folder/results.json")


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("cpu_serving", NOWHERE, "there is no folder /no/such/folder"),
        ("cpu_serving", ("--model", "middle"), "unknown: 'middle'; did you mean 'mid'?"),
        ("cpu_serving", ("--dtype", "bfloat"), "unknown: 'bfloat'; did you mean 'bfloat16'?"),
        ("decode_layers", ("tiny:2:40", "--variant", "base=", "--dry", *NOWHERE), "there is no folder /no/such/folder"),
        ("left_out_rows", ("tiny", *NOWHERE), "there is no folder /no/such/folder"),
        ("step_profile", ("tiny", *NOWHERE), "there is no folder /no/such/folder"),
        ("trace_steps", ("tiny", *NOWHERE), "there is no folder /no/such/folder"),
        ("two_checkouts", (str(ROOT), "--device", "cpu", *NOWHERE), "there is no folder /no/such/folder"),
    ],
)
def test_a_script_refuses_what_it_could_not_do_at_its_end(script, words, message, monkeypatch):
    if script == "decode_layers":
        pytest.importorskip("triton", reason="reads the launch table: runs where there is Triton")
    monkeypatch.syspath_prepend(str(FOLDER))
    app = typer.Typer()
    app.command()(runpy.run_path(str(FOLDER / f"{script}.py"))["main"])
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.replace("│", " ").split())
