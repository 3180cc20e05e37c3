"""The benchmark command, on a CPU: its output, the results that it flags, and the cases it omits with a reason."""

import dataclasses
import inspect
import json
import os
import signal
import sys

import pytest
import torch
import typer
from readme import ROOT
from typer.testing import CliRunner

from vllm_opset import ops
from vllm_opset.bench import peers
from vllm_opset.bench.ceilings import Ceilings
from vllm_opset.bench.format import command_line
from vllm_opset.bench.measure import Candidate, Result, candidates, cases, measure
from vllm_opset.bench.report import OpsReport
from vllm_opset.bench.timing import CPU_SWEEP_BYTES, Timing, time_call
from vllm_opset.cli.bench import bench
from vllm_opset.cli.outputs import OUTPUTS
from vllm_opset.kernel import REFERENCE, Kernel
from vllm_opset.ops.contract import Cost
from vllm_opset.ops.schemes import FP8, INT8

CEILINGS = Ceilings(1e10, 1e12, torch.float32)
RESULTS = ROOT / "docs" / "benchmarks"
SAMPLE = cases(ops.rms_norm, "cpu", torch.float32, "T1 H4096")[0]


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(bench)
    return lambda *arguments: CliRunner().invoke(app, arguments)


def candidate(function, name="mine", peer=True):
    return Candidate(Kernel("rms_norm", name, name, (), lambda problem: None, function), peer)


def notes(*results) -> list[str]:
    return OpsReport("a CPU", CEILINGS, [*results], {}).notes()


def test_command_writes_table_json_page_and_picture(run, tmp_path):
    files = [tmp_path / name for name in ("results.json", "page.md", "ops.png")]
    # An op and a peer that are named twice are timed once.
    arguments = ("rms_norm", "rms_norm", "--case", "T1 *", "--device", "cpu", "--dtype", "float32", "--kernel", "cpu")
    outputs = [word for pair in zip(("--json", "--markdown", "--plot"), map(str, files), strict=True) for word in pair]
    peers_twice = [word for name in ("torch_eager", "vllm_compiled", "torch_eager") for word in ("--against", name)]
    result = run(*arguments, *outputs, *peers_twice)
    assert result.exit_code == 0, result.output
    assert "T1 H4096" in result.output
    (report,) = json.loads(files[0].read_text())
    timed = {row["implementation"]: row for row in report["results"]}
    assert len(timed) == len(report["results"])
    assert timed["cpu"]["reproduce"].endswith("--kernel cpu --device cpu"), "a GPU would be the default"
    assert timed["cpu"]["seconds"] > 0 and timed["torch_eager"]["seconds"] > 0
    page = files[1].read_text()
    assert timed["cpu"]["reproduce"] in page and "](results.json)" in page and "](ops.png)" in page
    assert "CUDA" in report["skipped"]["vllm_compiled"]
    assert files[2].read_bytes().startswith(b"\x89PNG")


def broken() -> None:
    raise RuntimeError("an illegal memory access, after which every call fails")


@pytest.mark.parametrize(
    ("end", "code"),
    [(lambda: signal.raise_signal(signal.SIGTERM), 128 + signal.SIGTERM), (broken, 1)],
    ids=["SIGTERM", "an exception"],
)
def test_at_its_end_it_reports_what_it_has_measured(end, code, run, given_ceilings, monkeypatch, tmp_path):
    calls = []

    def ended(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            end()
        return measure(*arguments)

    monkeypatch.setattr(f"{bench.__module__}.measure", ended)
    arguments = ("rms_norm", "--case", "T1 *", "--device", "cpu", "--kernel", "cpu", "--against", "torch_eager")
    result = run(*arguments, "--json", str(file := tmp_path / "results.json"), "--conditions", "A test.")
    assert result.exit_code == 1, result.output
    assert ("an illegal memory access" in result.stderr) == (end is broken)
    (report,) = json.loads(file.read_text())
    assert [row["case"] for row in report["results"]] == ["T1 H4096"]
    assert report["conditions"] == "A test. Ended before 1 of 2 measurements." and report["conditions"] in result.stdout
    # Without a result there is nothing to report.
    del calls[1:]
    assert run(*arguments).exit_code == code


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("rms_nrom",), "rms_norm"),
        (("rms_norm", "--against", "torch_eagre"), "torch_eager"),
        (("rms_norm", "--dtype", "bfloat"), "bfloat16"),
        (("rms_norm", "--case", "T5"), "no case matches"),
        (("rms_norm", "--alone", "--against", "torch_eager"), "--alone leaves out"),
        (("rms_norm", "--json", "/no/such/folder/results.json"), "/no/such/folder"),
        (("rms_norm", "--plot", "ops.foo"), ".svg"),
        (("--from", str(RESULTS / "h200-engines.json")), "no results of this command"),
        (("rms_norm", "--from", str(RESULTS / "h200.json")), "--from measures nothing: leave out rms_norm"),
        (("--from", str(RESULTS / "h200.json"), "--case", "T1 *", "--conditions", "A test."), "--case, --conditions"),
        (("rms_norm", "--seed", "3"), "only random problems have a seed: add --random"),
    ],
)
def test_wrong_words_are_errors_that_name_the_nearest_known(run, arguments, hint):
    result = run(*arguments)
    assert result.exit_code == 2
    assert hint in " ".join(result.output.replace("│", "").split())


def test_a_file_of_results_is_a_list(run, tmp_path):
    (file := tmp_path / "number.json").write_text("5")
    result = run("--from", str(file))
    assert result.exit_code == 2 and "it has no list of runs" in " ".join(result.output.replace("│", "").split())


def test_a_picture_needs_the_extra_that_brings_matplotlib(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    result = run("rms_norm", "--device", "cpu", "--plot", str(tmp_path / "roofline.png"))
    assert result.exit_code == 2
    assert "pip install '.[plot]' in a clone" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("option", ["--json", "--markdown"])
def test_a_folder_is_no_file_to_write(option, run, tmp_path):
    """It is refused before anything is measured."""
    result = run("rms_norm", "--device", "cpu", option, str(tmp_path))
    assert result.exit_code == 2
    assert "is a folder: name a file in it" in " ".join(result.output.replace("│", " ").split())


def test_a_file_that_may_not_be_written_is_refused_before_anything_is_measured(run, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda *_: False)
    result = run("rms_norm", "--json", str(tmp_path / "results.json"))
    assert result.exit_code == 2 and "permission denied" in result.output


def test_a_command_is_kept_without_the_files_that_it_writes(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vllm-opset", "bench", "gelu", "--json", "a", "--markdown=b", "--case", "T1 *"])
    assert command_line(OUTPUTS) == "bench gelu --case 'T1 *'"


def test_a_wrong_result_is_timed_and_flagged():
    def wrong(*args, **kwargs):
        return ops.rms_norm(*args, **kwargs) * 1.02

    result = measure(ops.rms_norm, SAMPLE, candidate(wrong), "cpu", torch.float32, CEILINGS)
    assert result.seconds > 0
    assert "tolerance" in result.check


def test_what_cannot_do_a_case_is_left_out_with_its_reason():
    def refuse(*args, **kwargs):
        raise NotImplementedError("only on Tuesdays")

    result = measure(ops.rms_norm, SAMPLE, candidate(refuse), "cpu", torch.float32, CEILINGS)
    assert result.seconds is None and result.check is None
    assert "only on Tuesdays" in result.skipped
    assert notes(result) == ["rms_norm, mine was not timed: only on Tuesdays (T1 H4096)"]


def test_a_peer_that_fails_does_not_end_the_run():
    """Its packages may lack a file, say. The results before and after it would be lost."""
    broken = candidate(failing(FileNotFoundError("no template")))
    result = measure(ops.rms_norm, SAMPLE, broken, "cpu", torch.float32, CEILINGS)
    assert (result.skipped, result.check) == ("raised FileNotFoundError: no template", None)


def failing(error: Exception, calls: int = 0, off: float = 1.0):
    """A kernel that raises after this number of calls. Until then, each result is wrong by a factor."""
    left = iter(range(calls))

    def run(*args, **kwargs):
        if next(left, None) is None:
            raise error
        return ops.rms_norm(*args, **kwargs) * off

    return run


@pytest.mark.parametrize(
    ("function", "verdict"),
    [
        (failing(RuntimeError("out of shared memory\nat line 3")), "raised RuntimeError: out of shared memory"),
        (failing(NotImplementedError("only on Tuesdays")), "raised NotImplementedError: only on Tuesdays"),
        (failing(ValueError("no such stride")), "raised ValueError: no such stride"),
        (failing(RuntimeError("not while capturing"), calls=1), "raised RuntimeError: not while capturing"),
        (failing(RuntimeError("not while capturing"), calls=1, off=1.02), "times the tolerance"),
    ],
    ids=["always", "as peers do", "another error", "when timed", "when timed, and wrong"],
)
def test_a_kernel_of_ours_that_raises_is_wrong_not_left_out(function, verdict):
    result = measure(ops.rms_norm, SAMPLE, candidate(function, peer=False), "cpu", torch.float32, CEILINGS)
    assert verdict in result.check and "\n" not in result.check
    assert result.skipped is None and result.seconds is None
    assert notes(result) == [f"rms_norm, mine: {result.check} (T1 H4096)"]


def test_a_kernel_of_ours_that_does_not_support_a_case_is_left_out():
    ours = candidate(ops.rms_norm, peer=False)
    ours = dataclasses.replace(ours, kernel=dataclasses.replace(ours.kernel, supports=lambda problem: "only fp16"))
    result = measure(ops.rms_norm, SAMPLE, ours, "cpu", torch.float32, CEILINGS)
    assert (result.skipped, result.check) == ("only fp16", None)


def test_a_reference_that_cannot_be_timed_is_left_out():
    """References may read lengths back, which a CUDA graph cannot capture."""
    function = failing(RuntimeError("not while capturing"), calls=1)
    reference = candidate(function, REFERENCE, peer=False)
    result = measure(ops.rms_norm, SAMPLE, reference, "cpu", torch.float32, CEILINGS)
    assert (result.skipped, result.check) == ("not while capturing", None)


def test_the_floor_is_the_longer_of_moving_and_computing():
    assert CEILINGS.floor(Cost(bytes=10**10, flops=1)) == 1
    assert CEILINGS.floor(Cost(bytes=1, flops=2 * 10**12)) == 2


@pytest.mark.parametrize(
    ("factors", "fp8_rate", "seconds"),
    [
        (FP8, 2e12, 1),
        (INT8, 2e12, 1),
        (FP8, None, 2),  # a CPU widens the factors
        (FP8, 5e11, 2),  # and so may a kernel
        (None, 2e12, 2),
    ],
)
def test_the_floor_of_products_of_fp8_and_int8_has_the_rate_of_fp8(factors, fp8_rate, seconds):
    ceilings = dataclasses.replace(CEILINGS, fp8_flops_per_second=fp8_rate)
    assert ceilings.floor(Cost(bytes=1, flops=2 * 10**12, factors=factors)) == seconds


def test_a_product_of_fp8_may_take_less_time_than_one_of_bf16(monkeypatch):
    """The call takes 0.6 of the time of its FLOP at the rate of bf16. Memory is too fast to matter."""
    op, limits = ops.linear, Ceilings(1e30, 1e12, torch.bfloat16, 2e12)
    (sample,) = (one for one in op.samples("cpu", torch.bfloat16) if one.name == "fp8 per channel and token")
    args, kwargs = sample.make()
    at_bf16 = op.cost_of(*args, **kwargs).flops / 1e12
    monkeypatch.setattr(f"{measure.__module__}.time_call", lambda *_: Timing(0.6 * at_bf16, 0))
    result = measure(op, sample, candidate(op.reference), "cpu", torch.bfloat16, limits)
    assert (result.floor, result.check, result.doubt) == (0.5 * at_bf16, None, None)


def test_the_line_on_the_machine_names_the_rate_of_fp8_if_it_was_measured():
    rates = "a GPU: reading 4.39 TB/s, bfloat16 matmul 736 TFLOP/s"
    known = Ceilings(4.39e12, 7.36e14, torch.bfloat16)
    assert OpsReport("a GPU", known, [], {}).described() == rates
    report = OpsReport("a GPU", dataclasses.replace(known, fp8_flops_per_second=1.312e15), [], {})
    assert report.described() == f"{rates}, fp8 matmul 1.31 PFLOP/s"
    assert OpsReport.from_json(json.loads(json.dumps(report.as_json()))) == report


@pytest.mark.parametrize(
    ("seconds", "spread", "cell", "doubt"),
    [
        (100e-6, 20e-6, "100.00 ± 20.00, 50%", None),
        (100e-6, 30e-6, "100.00 ± 30.00, 50% ?", "differs too much from call to call: repeat it"),
        (27e-6, 1e-6, "27.00 ± 1.00, 185% ?", "faster than its floor"),
    ],
)
def test_a_time_that_says_little_is_marked_and_noted(seconds, spread, cell, doubt):
    result = Result(
        "rms_norm",
        "T1",
        "float32",
        "mine",
        True,
        "again",
        bytes=1,
        flops=1,
        floor=50e-6,
        seconds=seconds,
        spread=spread,
    )
    report = OpsReport("a CPU", CEILINGS, [result], {})
    ((_, _, (row,)),) = report.tables()
    assert row["mine"] == cell
    assert [doubt in note and note.endswith("(T1)") for note in report.notes()] == ([True] if doubt else [])
    assert OpsReport.from_json(json.loads(json.dumps(report.as_json()))) == report


def test_a_speed_up_is_over_vllms_compiled_kernel_or_the_fastest_peer():
    def timed(implementation, seconds, op="rms_norm", case="T1", peer=True):
        return Result(op, case, "float32", implementation, peer, "again", seconds=seconds)

    ours = [timed(name, s, peer=False) for name, s in {"triton": 2.0, "triton:other": 1.0, "reference": 0.5}.items()]
    theirs = [timed("torch_eager", 4.0), timed("vllm_triton", 3.0), timed("vllm_triton", 9.0, case="T2")]
    assert OpsReport("a GPU", None, ours + theirs, {}).speed_ups("rms_norm") == (False, [1.5])
    compiled = [timed("vllm_compiled", 5.0), timed("vllm_compiled", 5.0, op="relu2")]
    assert OpsReport("a GPU", None, ours + theirs + compiled, {}).speed_ups("rms_norm") == (True, [2.5])
    assert OpsReport("a GPU", None, compiled, {}).speed_ups("relu2") == (True, [])


def test_calls_do_not_share_their_operands():
    """A call that mutates its input gets a fresh input, or its own from an earlier round, but never another call's."""
    x, seen = torch.zeros(1 << 16), set()

    def run(x):
        seen.add(x.data_ptr())
        return x.add_(1)

    time_call(run, ((x,), {}), "cpu")
    assert len(seen) > 2


def test_caches_are_swept_before_operands_are_used_again(monkeypatch):
    """All copies of small operands fit into a CPU's cache."""
    x, events = torch.zeros(16), []
    monkeypatch.setattr(torch.Tensor, "amax", lambda swept: events.append(swept.nbytes))
    time_call(lambda x: events.append(x.data_ptr()), ((x,), {}), "cpu")
    for round_ in " ".join(map(str, events)).split(f" {CPU_SWEEP_BYTES} "):
        calls = round_.split()
        assert len(calls) == len(set(calls))


@pytest.mark.parametrize("name", peers.NAMES)
def test_peers_have_the_signatures_of_the_ops(name):
    for op in ops.ALL:
        function = peers.implementation(name, op)
        if inspect.isfunction(function) and not hasattr(peers.peer(name), "any_op"):
            assert list(inspect.signature(function).parameters) == list(op.signature.parameters), op.name


def test_on_a_cpu_the_reference_is_a_candidate():
    assert "reference" in [c.kernel.name for c in candidates(ops.relu2, "cpu", None, [])]
    assert "reference" not in [c.kernel.name for c in candidates(ops.relu2, "cuda", None, [])]


def drawing(draw) -> Candidate:
    """A peer that draws a token from each row's processed logits."""

    def run(*args, **kwargs):
        _, kept = ops.top_k_top_p_sample.reference(*args, **kwargs | {"processed": "logits"})
        return draw(kept), None

    return Candidate(Kernel("top_k_top_p_sample", "mine", "mine", (), lambda problem: None, run), peer=True)


@pytest.mark.parametrize(
    ("draw", "verdict"),
    [
        (lambda kept: kept.argmax(1), None),
        (lambda kept: kept.argmin(1), "tokens are not among those that the filters keep"),
    ],
    ids=["likeliest", "least likely"],
)
@pytest.mark.parametrize("name", ["top-k of 1, 2, 50 and off", "top-p from tiny to off", "one row, many tokens"])
def test_a_peer_that_draws_other_tokens_is_right_if_the_filters_keep_them(name, draw, verdict):
    op = ops.top_k_top_p_sample
    (sample,) = (one for one in op.samples("cpu", torch.float32) if one.name == name)
    check = measure(op, sample, drawing(draw), "cpu", torch.float32, CEILINGS).check
    assert check is None if verdict is None else verdict in check


@pytest.mark.parametrize("name", ["greedy, equal maxima", "every row greedy, equal maxima"])
def test_nothing_is_drawn_of_greedy_rows(name):
    op = ops.top_k_top_p_sample
    (sample,) = (one for one in op.samples("cpu", torch.float32) if one.name == name)
    result = measure(op, sample, drawing(lambda kept: kept.argmax(1)), "cpu", torch.float32, CEILINGS)
    assert result.skipped == "greedy tokens are not drawn" and result.seconds is None
