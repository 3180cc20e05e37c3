"""The evidence for the parts of opset on stock vLLM: what it decides, and that its ratios were measured."""

import itertools
import json
import statistics
from collections.abc import Iterator, Mapping

import pytest
from readme import ROOT
from refusals_table import rows_of_evidence

from vllm_opset.bench.compare_report import Report
from vllm_opset.platform.native import evidence, parts
from vllm_opset.platform.native.rules import SINKS

pytestmark = pytest.mark.window

# What stock vLLM's own times differ by between two engines.
NOISE = 0.005
MOE = "mixture-of-experts (MoE) models"
# Kinds that no rule of the part decides on: of single layers, and of all models that have the part.
BESIDE_RULES = {"attention": {SINKS}, "moe": {MOE}}


def test_the_rows_of_evidence_are_well_formed():
    for family, row in evidence.defaults().items():
        found = evidence.evidence(int(family.removeprefix("sm")))
        assert len({(one.part, one.kind) for one in found}) == len(found), "two rows of one part and kind"
        for one in found:
            kinds = {kind.feature for kind in parts.RULES[one.part].kinds} | BESIDE_RULES.get(one.part, set())
            assert one.kind in kinds, f"no rule of {one.part} names {one.kind}"
            assert one.on == (max(one.ratios.values()) <= 1 + NOISE), one
        by_experts = [one.on for one in found if (one.part, one.kind) == ("moe", MOE)]
        assert bool(row["moe"]) == any(by_experts), "the part moe is on where it was measured"


# The rows that were measured with the parts that are on by default, which are this part alone for the kind.
BY_DEFAULT = {("attention", "fp8 weights")}
# The rows whose total time is that of the fastest run of stock vLLM, which compiled kernels in the others.
TO_FASTEST_RUN = {("moe", "gpt-oss's MXFP4 weights")}
# By a row's name of a quantity, that of a comparison.
METRICS = {"TTFT": "TTFT, s", "TPOT": "TPOT, ms"}
DIGITS = 3


@pytest.mark.parametrize("row", rows_of_evidence(), ids=lambda row: f"{row.part}, {row.kind}")
def test_every_ratio_is_that_of_the_measured_times(row):
    """One pair of engines gives all ratios. If none does, what differs from the nearest pair is shown."""
    differences = [(row.ratios.items() - measured.items(), measured) for measured in _measured(row)]
    assert differences, "no such comparison in that file"
    wrong, measured = min(differences, key=lambda difference: len(difference[0]))
    assert wrong == set()
    assert set(_left_out(row, measured)) == set()


def _left_out(row: evidence.Evidence, measured: Mapping[str, float]) -> Iterator[str]:
    """The measured quantities that the row lacks. It needs both times of a case, or the total time where they vary."""
    for name in measured.keys() - row.ratios.keys():
        quantity, _, case = name.partition(" ")
        if quantity in METRICS and f"total {case}" not in row.ratios:
            yield name


def _measured(row: evidence.Evidence) -> Iterator[dict[str, float]]:
    """The ratios of each pair of engines with the part and without it, in comparisons of the row's model and commit."""
    for run in json.loads((ROOT / row.data).read_text()):
        model, *_ = run["shape"]["name"].split()
        if run["commit"] == row.commit and row.model.startswith(f"{model}'s shape"):
            turned_on = {engine["name"]: _turned_on(row, engine) for engine in run["engines"]}
            for one, other in itertools.product(turned_on, repeat=2):
                if turned_on[one] and not turned_on[other]:
                    yield dict(_ratios(run, one, other, (row.part, row.kind) in TO_FASTEST_RUN))


def _turned_on(row: evidence.Evidence, engine: Mapping) -> bool:
    asked = engine["env"].get("OPSET_NATIVE")
    if asked is None:
        return engine["env"].get("OPSET_PLATFORM") == "native" and (row.part, row.kind) in BY_DEFAULT
    return f"{row.part}=on" in asked.split(",")


def _ratios(run: Mapping, one: str, other: str, to_fastest: bool) -> Iterator[tuple[str, float]]:
    """The ratio of each quantity and case. to_fastest: whether total times are divided by that of the fastest run."""
    for case, results in Report(run).by_case().items():
        for quantity, metric in METRICS.items():
            if metric in results[one]["metrics"]:
                times, others = (results[name]["metrics"][metric] for name in (one, other))
                yield f"{quantity} {case}", round(statistics.median(times) / statistics.median(others), DIGITS)
        if all(results[name]["runs"] for name in (one, other)):
            times, others = ([run["total"] for run in results[name]["runs"]] for name in (one, other))
            to = min(others) if to_fastest else statistics.median(others)
            yield f"total {case}", round(statistics.median(times) / to, DIGITS)
