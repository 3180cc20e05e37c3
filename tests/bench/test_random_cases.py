"""Random problems: what is drawn, and how implementations are compared on them."""

import dataclasses
import json
import random
import re
import statistics

import pytest
import torch
import typer
from typer.testing import CliRunner

from vllm_opset import ops
from vllm_opset.bench.measure import Candidate, Result
from vllm_opset.bench.plan import Plan
from vllm_opset.bench.random_cases import comparisons, kind_of, random_cases, tables
from vllm_opset.bench.report import OpsReport
from vllm_opset.cli.bench import bench
from vllm_opset.cli.jobs import in_processes
from vllm_opset.kernel import Kernel
from vllm_opset.ops import _draws
from vllm_opset.ops.attention import _paged_draws
from vllm_opset.ops.gemm import _linear_draws
from vllm_opset.ops.moe import _experts_draws
from vllm_opset.ops.sampling import _sampling_draws
from vllm_opset.parity import check_sample


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


# By kind. A single token has one scale, or one for each block.
SCHEMES = {
    "fp32": "none",
    "fp8-blocks": "float8_e4m3fn 128x128 by float8_e4m3fn (1|all)x128",
    "fp8-channels": "float8_e4m3fn per row by float8_e4m3fn per (row|tensor)",
    "int4": "uint4 1x(32|64|128)( with zero points)? by activations as they are",
    "mxfp4": "float4_e2m1fn_x2 1x32 by activations as they are",
}
# The kind in the name of a problem, and the sizes that bound its memory.
LINEAR = re.compile(r"(\S+) T(\d+) (\d+) to (\d+) \((qkv|o|gate-up|down)[^()]*\)")
EXPERTS = re.compile(r"(\S+) T(\d+) E(\d+) k(\d+) H(\d+) I(\d+)( \([^()]*\))?")
# Whether problems of a kind have a top-k and a top-p.
FILTERS = {"top-k": (True, False), "top-p": (False, True), "both": (True, True), "unfiltered": (False, False)}


def sizes(op, pattern: re.Pattern, device: str, number: int = 600) -> list[tuple[str, list[int]]]:
    """The kinds and the sizes in the names of many problems."""
    names = [op.draw(device, torch.bfloat16, random.Random(seed)).name for seed in range(number)]
    groups = [pattern.fullmatch(name).groups() for name in names]
    return [(kind, [int(size) for size in rest if size and size.isdigit()]) for kind, *rest in groups]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_products_are_of_all_kinds_and_fit(device):
    limits, found = _draws.limits(device), sizes(ops.linear, LINEAR, device)
    for kind, (tokens, in_features, out_features) in found:
        assert 1 <= tokens <= limits.tokens and in_features * out_features <= limits.elements
        assert tokens * max(in_features, out_features) <= limits.activations
        assert in_features % (64 if kind == "bf16" else 128) == 0 and out_features % 64 == 0
    assert {kind for kind, _ in found} == {"bf16", *_linear_draws.KINDS[1:]}
    assert_tokens(device, [tokens for _, (tokens, *_) in found])
    hidden = {size for _, (_, *features) in found for size in features}
    assert hidden & {*limits.hidden_sizes} and len(hidden - {*limits.hidden_sizes}) > 10


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_experts_are_of_all_kinds_and_fit(device):
    limits, found = _draws.limits(device), sizes(ops.fused_experts, EXPERTS, device)
    for kind, (tokens, experts, top_k, hidden_size, width) in found:
        assert 1 <= tokens <= limits.tokens and 1 <= top_k <= experts
        assert 3 * experts * hidden_size * width <= limits.elements
        assert hidden_size % (multiple := 64 if kind == "bf16" else 128) == 0 and width % multiple == 0
    assert {kind for kind, _ in found} == {"bf16", *_experts_draws.KINDS[1:]}
    assert_tokens(device, [tokens for _, (tokens, *_) in found])
    if device == "cuda":
        assert {experts for _, (_, experts, *_) in found} == {*_experts_draws.EXPERTS}
        assert {top_k for _, (_, _, top_k, *_) in found} == {*_experts_draws.TOP_K}


def test_settings_of_sampling_are_of_all_kinds_and_keep_few_tokens_and_many():
    kinds, shares = set(), []
    for seed in range(60):
        sample = _sampling_draws.draw("cpu", torch.float32, random.Random(seed))
        (logits, keys), settings = sample.make()
        kinds.add(sample.name.split()[0])
        assert len(keys) == len(logits) <= _sampling_draws.ROWS["cpu"]
        assert logits.shape[1] in _sampling_draws.VOCABULARIES["cpu"]
        assert ("top_k" in settings, "top_p" in settings) == FILTERS[sample.name.split()[0]]
        _, kept = ops.top_k_top_p_sample.reference(logits, keys, **settings, processed="logits")
        shares.append(kept.isfinite().double().mean().item())
    assert kinds == {*FILTERS} and min(shares) < 0.002 and statistics.median(shares) < 0.2 and max(shares) == 1


def assert_tokens(device: str, tokens: list[int]) -> None:
    """Asserts that more than half of the problems are of decode steps, and that others have many tokens."""
    few = statistics.mean(number <= _draws.FEW_TOKENS for number in tokens)
    assert 0.6 < few < 0.95 and min(tokens) == 1 and max(tokens) > _draws.limits(device).tokens / 2


@pytest.fixture
def small(monkeypatch):
    """Problems that take milliseconds."""
    monkeypatch.setitem(_draws.LIMITS, "cpu", _draws.Limits(16, 2**21, 2**21, (256, 512)))


@pytest.mark.parametrize("op", [ops.linear, ops.fused_experts], ids=str)
def test_a_problem_is_stored_as_its_kind_says_and_its_results_are_of_order_one(op, small):
    kinds = set()
    for seed in range(14):
        sample = op.draw("cpu", torch.float32, random.Random(seed))
        args, kwargs = sample.make()
        kind = kind_of(f"#0 {sample.name}")
        kinds.add(kind)
        assert re.fullmatch(SCHEMES[kind], str(op.problem_for(*args, **kwargs).scheme)), sample
        result = op(*args, **kwargs)
        assert result.isfinite().all() and 0.02 < result.std() < 2, sample
    assert len(kinds) >= 4


@pytest.mark.parametrize("op", [ops.linear, ops.fused_experts], ids=str)
def test_the_tolerance_of_a_problem_sees_a_wrong_row_and_lets_the_dtype_pass(op, small):
    """The reference rounds to bf16 alone. A kernel that loses a row of the results is wrong."""

    def lossy(*args, **kwargs):
        result = op.reference(*args, **kwargs)
        result[-1] = 0
        return result

    right, wrong = (Kernel(op.name, "mine", "mine", (), lambda problem: None, run) for run in (op.reference, lossy))
    for seed in (100, 101, 103):
        sample = op.draw("cpu", torch.bfloat16, random.Random(seed))
        assert check_sample(op, right, sample, torch.bfloat16).failure is None, sample
        assert "mismatch" in check_sample(op, wrong, sample, torch.bfloat16).failure, sample


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


def test_kinds_are_compared_by_themselves():
    found = [result("cpp", f"#{i} {kind} T1", 2) for i, kind in enumerate(("bf16", "int4", "int4"))]
    found[1] = dataclasses.replace(found[1], check="is off")
    found += [result("flash", "#0 bf16 T1", 4), result("flash", "#1 int4 T1", 1), result("flash", "#2 int4 T1", 3)]
    compared = {(one.other, one.kind): one for one in comparisons(found)}
    assert list(compared) == [(other, kind) for other in ("floor", "flash") for kind in (None, "bf16", "int4")]
    assert compared["flash", None].geometric_mean == pytest.approx((2 * 0.5 * 1.5) ** (1 / 3))
    int4 = compared["flash", "int4"]
    assert int4.ratios == pytest.approx({"#1 int4 T1": 0.5, "#2 int4 T1": 1.5}) and int4.as_json()["kind"] == "int4"
    assert [(one.wrong, one.checked) for one in (int4, compared["flash", "bf16"])] == [(1, 2), (0, 1)]
    (_, columns, rows), *worst = tables(found)
    assert columns[:2] == ["beside", "kind"] and [row["kind"] for row in rows] == ["all", "bf16", "int4"] * 2
    assert len(worst) == 2  # of all kinds


def plan(*names: str, **changes) -> Plan:
    made = Plan(names, "cpu", torch.float32, None, (), "*", {"number": 5, "seed": 3})
    return dataclasses.replace(made, **changes)


def test_each_measurement_is_called_once_ahead_of_all(monkeypatch):
    called = []

    def run(x, weight, *rest, **kwargs):
        called.append(x)
        if len(called) == 2:
            raise RuntimeError("out of memory")

    mine = Candidate(Kernel("linear", "mine", "mine", (), lambda problem: None, run), peer=False)
    monkeypatch.setattr("vllm_opset.bench.plan.candidates", lambda *_: [mine])
    failures = [failure for first in range(2) for failure in plan("linear").call_ahead(first, 2)]
    assert len(called) == 5
    (failure,) = failures
    assert failure.startswith("linear, mine, #2 ") and failure.endswith("out of memory")


def test_calls_ahead_are_made_in_other_processes():
    ahead = plan("rms_norm", drawn=None, pattern="T1 *").call_ahead
    assert list(in_processes(ahead, [(0, 2), (1, 2)], 2)) == [[], []]


def test_the_command_compares_and_writes_what_it_found(tmp_path, given_ceilings, monkeypatch):
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
    again = OpsReport.from_json(run)
    assert again.as_json() == run and f"### paged_attention, {kernel} beside others" in page.read_text()


def test_an_op_that_draws_nothing_is_refused():
    app = typer.Typer()
    app.command()(bench)
    finished = CliRunner().invoke(app, ("rms_norm", "--random", "3", "--device", "cpu"))
    assert finished.exit_code == 2 and "paged_attention, linear" in " ".join(finished.output.replace("│", "").split())
