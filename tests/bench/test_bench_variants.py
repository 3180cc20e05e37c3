"""Benchmarks and tuning read the table of a kernel's variants: which one runs a case, and which others can."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from vllm_opset import ops
from vllm_opset.bench import tune
from vllm_opset.bench.ceilings import Ceilings
from vllm_opset.bench.measure import Candidate, Peer, by_variant, cases, measure
from vllm_opset.cli import app
from vllm_opset.kernel import Kernel, kernels_of
from vllm_opset.variants import Variant, Variants

CEILINGS = Ceilings(1e10, 1e12, torch.float32)
CASES = {sample.name: sample for sample in cases(ops.relu2, "cpu", torch.float32, "*")}


def rows(x: torch.Tensor) -> int:
    return len(x)


TABLE = Variants(
    rows,
    Variant("few", can=lambda rows: rows <= 16, suits=lambda rows: rows == 1),
    Variant("none", can=lambda rows: False),
    Variant("any"),
)


def relu2(x: torch.Tensor, variant: str | None = None) -> torch.Tensor:
    ran.append(TABLE.of(variant, x))
    return ops.relu2(x)


ran: list[str] = []
MINE = Kernel("relu2", "mine", "mine", (), lambda problem: None, relu2, variants=TABLE)


def timed(candidate: Candidate, case: str, others: bool = False) -> dict:
    """What ran, and the result, by implementation."""
    found = {}
    for one in by_variant(ops.relu2, candidate, CASES[case], others):
        ran.clear()
        result = measure(ops.relu2, CASES[case], one, "cpu", torch.float32, CEILINGS)
        found[result.implementation] = (set(ran), result)
    return found


def names() -> tuple[str, str]:
    """A case of one row, and one of more than 16."""
    sizes = {name: len(sample.make()[0][0]) for name, sample in CASES.items()}
    return next(n for n, rows in sizes.items() if rows == 1), next(n for n, rows in sizes.items() if rows > 16)


def test_every_variant_that_can_is_timed_and_named():
    one, many = names()
    found = timed(Candidate(MINE, False), one, others=True)
    assert {name: (ran, result.variant) for name, (ran, result) in found.items()} == {
        "mine": ({"few"}, "few"),
        "mine:any": ({"any"}, "any"),
    }
    found = timed(Candidate(MINE, False), many, others=True)
    assert {name: result.variant for name, (_, result) in found.items()} == {"mine": "any"}


def test_the_command_times_the_variants_of_a_kernel(tmp_path, given_ceilings):
    file = tmp_path / "results.json"
    words = (
        "bench",
        "paged_attention",
        "--device",
        "cpu",
        "--alone",
        "--case",
        "decode B1 ctx200",
        "--json",
        str(file),
    )

    def implementations(*more: str) -> dict[str, dict]:
        finished = CliRunner().invoke(app, [*words, *more])
        assert finished.exit_code == 0, finished.output
        return {row["implementation"]: row for row in json.loads(file.read_text())[0]["results"]}

    table = kernels_of("paged_attention")["cpp"].variants
    found = implementations()
    assert {name for name in found if name.startswith("cpp")} == {"cpp", "cpp:torch"}
    assert found["cpp"]["variant"] == "decode" and set(table.by_name) == {"decode", "mixed", "torch"}
    (one,) = implementations("--kernel", "cpp:torch").values()
    assert (
        one["variant"] == "torch"
        and one["seconds"] > 0
        and one["reproduce"].endswith("--kernel cpp:torch --device cpu")
    )
    assert set(implementations("--kernel", "cpp")) == {"cpp"}


def test_a_variant_that_cannot_run_a_case_is_left_out_with_the_reason():
    _, many = names()
    asked = Candidate(MINE, False, variant="few")
    ((found, result),) = timed(asked, many).values()
    assert found == set() and result.seconds is None and result.skipped == "few cannot run it"


@pytest.mark.parametrize(("asked", "nearest"), [("cpp:decod", "'cpp:decode'"), ("cpp:", "'cpp'")])
def test_an_unknown_variant_is_an_error_that_names_the_nearest(asked, nearest):
    finished = CliRunner().invoke(app, ["bench", "paged_attention", "--device", "cpu", "--kernel", asked])
    assert finished.exit_code == 2 and "did you mean" in finished.output and nearest in finished.output


def test_a_launch_of_a_variant_is_named_after_op_and_variant():
    from vllm_opset.kernels.triton import _launch

    of_variants = {launch: tune.variant_of(launch) for launch in _launch.table()}
    for launch, data in _launch.table().items():
        variants = kernels_of(data["op"], elsewhere=True)["triton"].variants
        if variants:
            assert launch == data["op"] or of_variants[launch] in variants.by_name, launch
        else:
            assert of_variants[launch] is None
    assert of_variants["paged_attention_decode"] == "decode" and of_variants["paged_attention"] is None
    assert of_variants["int4_grouped_gemm_wide_decode_sm90"] == "wide_decode_sm90", "not decode_sm90"


@pytest.mark.parametrize(
    ("variant", "expected"),
    [("few", lambda rows: rows == 1), ("any", lambda rows: rows > 1), ("none", lambda rows: False), (None, bool)],
)
def test_a_variant_is_tuned_on_the_cases_that_the_table_gives_it(variant, expected):
    found = tune.cases(ops.relu2, MINE, variant, "cpu", torch.float32)
    assert [s.name for s in found] == [name for name, s in CASES.items() if expected(len(s.make()[0][0]))]


def test_a_variant_that_no_case_is_given_to_is_tuned_on_those_that_it_can_run():
    table = Variants(rows, Variant("all"), Variant("few", can=lambda rows: rows <= 1), Variant("any"))
    kernel = Kernel("relu2", "mine", "mine", (), lambda problem: None, relu2, variants=table)
    one, _ = names()
    assert [sample.name for sample in tune.cases(ops.relu2, kernel, "few", "cpu", torch.float32)] == [one]


def test_launches_are_tuned_with_the_ops_dtype_and_what_a_model_prepares():
    op, kernel = ops.apply_penalties, kernels_of("apply_penalties", elsewhere=True)["reference"]
    logits = tune.cases(op, kernel, None, "cpu", torch.bfloat16)[0].make()[0][0]
    assert logits.dtype is torch.float32

    seen = []
    table = Variants(lambda x: seen.append(x) or len(x), Variant("any"))
    doubled = Peer("relu2", "mine", "mine", (), lambda _: None, relu2, variants=table, convert=lambda x: ((2 * x,), {}))
    case, *_ = tune.cases(ops.relu2, doubled, "any", "cpu", torch.float32)
    assert torch.equal(seen[0], 2 * case.make()[0][0])


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """Runs `vllm-opset tune` for these launches. The trials of layer_norm are interrupted."""
    pytest.importorskip("triton", reason="the command tunes Triton's kernels: runs where there is Triton")
    from vllm_opset.kernels.triton import _launch

    started = []

    def trials(launch):
        started.append(launch)
        yield tune.Trial("a case", 1, (("longest", math.inf), ("tile", 512)), 1e-6)
        if launch == "layer_norm":
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "trials", trials)
    monkeypatch.setattr(_launch, "target", lambda device: "nvidia/sm90")
    file = tmp_path / "trials.json"
    return lambda *launches: (CliRunner().invoke(app, ["tune", *launches, "--json", str(file)]), started, file)


def test_tuning_knows_all_launches_before_it_measures_one(tuned):
    finished, started, _ = tuned("rms_norm", "layer_nrom")
    assert finished.exit_code == 2 and "did you mean 'layer_norm'?" in " ".join(finished.output.split())
    assert not started


def test_tuning_keeps_the_launches_that_were_measured_before_an_interruption(tuned):
    finished, started, file = tuned("rms_norm", "layer_norm", "linear")
    assert finished.exit_code == 1 and "Ended before 2 of 3 launches." in finished.stderr
    assert started == ["rms_norm", "layer_norm"] and list(json.loads(file.read_text())) == ["rms_norm"]
    assert "      - {longest: .inf, tile: 512}\n" in finished.stdout
