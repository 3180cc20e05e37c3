"""Random problems: what is drawn, and how implementations are compared on them."""

import json
import random
import statistics

import pytest
import torch
import typer
from typer.testing import CliRunner

from vllm_opset import ops
from vllm_opset.bench.ceilings import Ceilings
from vllm_opset.bench.measure import Result
from vllm_opset.bench.random_cases import comparisons, random_cases, tables
from vllm_opset.bench.report import Report
from vllm_opset.cli.bench import bench
from vllm_opset.ops.attention import _paged_draws


@pytest.mark.parametrize("op", [op for op in ops.ALL if hasattr(op, "draw")], ids=str)
def test_a_problem_depends_on_its_number_and_the_seed_alone(op):
    few, many, others = (
        [sample.name for sample in random_cases(op, "cpu", torch.float32, number, seed, "*")]
        for number, seed in ((3, 1), (40, 1), (40, 2))
    )
    assert many[:3] == few and len(set(many)) == 40 and not set(many) & set(others)
    (again,) = random_cases(op, "cpu", torch.float32, 40, 1, "#17 *")
    assert again.name == many[17]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batches_are_legal_fit_and_are_of_all_kinds(device):
    load, kinds, windows = _paged_draws.LOADS[device], set(), 0
    for seed in range(400):
        sample = _paged_draws.draw(device, torch.bfloat16, random.Random(seed))
        case = sample.make.args[0]
        kinds.add(sample.name.split()[0])
        windows += case.window is not None
        assert all(1 <= query_len <= seq_len <= load.tokens for query_len, seq_len in case.requests), sample
        elements = sum(seq_len for _, seq_len in case.requests) * 2 * case.num_kv_heads * case.head_size
        assert elements <= load.elements and len(case.requests) <= load.requests
        assert case.num_heads % case.num_kv_heads == 0 and 0 < sample.scale <= 1
    assert kinds == {*_paged_draws.KINDS} and 60 < windows < 140


def result(implementation: str, case: str, microseconds: float | None, **known) -> Result:
    peer = implementation.startswith("flash")
    seconds = microseconds and microseconds * 1e-6
    return Result("paged_attention", case, "bfloat16", implementation, peer, "", floor=1e-6, seconds=seconds, **known)


def test_the_serving_kernel_is_compared_on_the_cases_that_both_did():
    results = [result("cpu", f"#{i}", 9) for i in range(3)]
    results += [result("cpp", f"#{i}", 2 + i, check="is off" if i == 1 else None) for i in range(12)]
    results += [result("flash", "#0", 8), result("flash", "#1", 1.5), result("flash", "#2", None, skipped="no window")]
    floor, cpu, flash = comparisons(results)
    assert [one.other for one in (floor, cpu, flash)] == ["floor", "cpu", "flash"]
    assert flash.kernel == "cpp" and flash.ratios == pytest.approx({"#0": 4, "#1": 0.5})
    assert flash.geometric_mean == pytest.approx(2**0.5) and flash.worst() == ["#1", "#0"]
    assert (floor.wrong, floor.checked) == (1, 12) and floor.worst()[0] == "#11" and len(floor.worst()) == 10
    assert floor.quantile(0) == pytest.approx(1 / 13) and floor.quantile(1) == pytest.approx(1 / 2)
    (title, _, (first, *_)), *worst = tables(results)
    assert title == "paged_attention, cpp beside others" and first["wrong"] == "1 of 12" and len(worst) == 3


def test_the_command_compares_and_writes_what_it_found(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_opset.bench.ceilings.measure", lambda *_: Ceilings(1e10, 1e12, torch.float32))
    monkeypatch.setitem(_paged_draws.LOADS, "cpu", _paged_draws.Load(2, 64, 8, 2**18, 1))
    app = typer.Typer()
    app.command()(bench)
    file, page = tmp_path / "random.json", tmp_path / "page.md"
    arguments = ("paged_attention", "--random", "3", "--seed", "5", "--device", "cpu", "--dtype", "float32")
    finished = CliRunner().invoke(app, (*arguments, "--alone", "--json", str(file), "--markdown", str(page)))
    assert finished.exit_code == 0, finished.output
    (run,) = json.loads(file.read_text())
    assert run["random"] == {"number": 3, "seed": 5} and run["comparisons"][0]["wrong"] == 0
    assert all(row["reproduce"].endswith(" --random 3 --seed 5") for row in run["results"])
    kernel = run["comparisons"][0]["kernel"]
    shares = [row["floor"] / row["seconds"] for row in run["results"] if row["implementation"] == kernel]
    assert run["comparisons"][0]["geometric_mean"] == pytest.approx(statistics.geometric_mean(shares))
    again = Report.from_json(run)
    assert again.as_json() == run and f"### paged_attention, {kernel} beside others" in page.read_text()


def test_an_op_that_draws_nothing_is_refused():
    app = typer.Typer()
    app.command()(bench)
    finished = CliRunner().invoke(app, ("rms_norm", "--random", "3", "--device", "cpu"))
    assert finished.exit_code == 2 and "paged_attention, linear" in " ".join(finished.output.replace("│", "").split())
