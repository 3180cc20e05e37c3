"""Reports of comparisons of engines, for results that were made up."""

import pytest

from vllm_opset.bench import engines, shapes
from vllm_opset.bench.compare import Comparison, ComparisonPlan, EngineResult
from vllm_opset.bench.compare_report import Report, as_plain, overview, page, record
from vllm_opset.bench.figures import ACCEPTANCE, Run
from vllm_opset.bench.format import TIMES

STARTED = {"versions": {}, "platform": "none", "device": None, "compiled": []}


def comparison(steps: int | None = None, **seconds: float) -> Report:
    """The report of engines, by name, that take so many seconds to their first tokens and as many for the others.

    steps: of the requests; by default each gives a request one token.
    """
    shape = shapes.load("tiny")
    case = shape.cases[0]
    steps = steps or case.batch * case.output
    plan = ComparisonPlan(shape, [case], [engines.Engine(name) for name in seconds], repetitions=1, cold=False)
    started = {name: engines.Started(1.0, **STARTED) for name in seconds}
    results = [
        EngineResult(case, name, run := Run(ttft, 2 * ttft, [], steps), [run], 1) for name, ttft in seconds.items()
    ]
    found = Comparison(plan.engines, started, dict.fromkeys(seconds, 0), results)
    return Report(record(plan, found, "the command"))


def test_a_page_begins_with_all_rates_to_stock():
    first, second = comparison(opset=1.0, stock=2.0), comparison(opset=3.0, stock=2.0)
    first.run["engines"][0]["env"]["OPSET_PLATFORM"] = "cuda"
    columns, rows = overview([first, comparison(opset=1.0, other=2.0), second])
    assert columns == ["comparison", "engine", "1x64/32"]
    assert [row[1:] for row in rows] == [["opset", f"0.667{TIMES}"], ["opset: `OPSET_PLATFORM=cuda`", f"2.000{TIMES}"]]
    # The second one has no stock, and the anchor -1 of three equal headings.
    assert rows[0][0].endswith("-2)") and not rows[1][0].endswith("-1)")
    assert f"| {rows[1][0]} | {rows[1][1]} |" in page([first], [], None)


@pytest.mark.parametrize(("steps", "lengths"), [(None, []), (1 + 31 // 2, ["2.07"])])
def test_the_mean_acceptance_length_is_shown_where_tokens_were_drafted(steps, lengths):
    _, rows = comparison(steps, stock=2.0).speed()
    assert [row[2] for row in rows if row[1] == ACCEPTANCE] == lengths


def test_every_engine_has_its_ratio_to_stock():
    head = as_plain(comparison(opset=1.0, stock=2.0, other=4.0).speed())[0]
    assert list(head) == ["case", "", "stock", "opset", "opset to stock", "other", "other to stock", "same tokens"]
    assert (head["opset to stock"], head["other to stock"]) == (f"0.500{TIMES}", f"2.000{TIMES}")
    assert head["same tokens"] == "1 of 1, 1 of 1"


def test_without_stock_the_first_engine_is_the_measure():
    head = as_plain(comparison(opset=1.0, other=4.0).speed())[0]
    assert head["other to opset"] == f"4.000{TIMES}"
