"""Requests that arrive at a rate: when they do, how they are handed to an engine, and their latencies."""

import math
import queue
import statistics
import threading
import time
from types import SimpleNamespace

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from vllm_opset.bench import engines, shapes
from vllm_opset.bench.cases import ArrivingTrace, Trace, from_row
from vllm_opset.bench.compare import Comparison, ComparisonPlan, EngineResult
from vllm_opset.bench.compare_report import Report, as_plain, page, record
from vllm_opset.bench.engines import engine_arrivals
from vllm_opset.bench.figures import LATENCIES, Run, latencies
from vllm_opset.cli import app
from vllm_opset.cli.e2e import _plan

SHORT = 0.2  # seconds of a step of an engine that is none


@settings(max_examples=50, deadline=None)
@given(requests=st.integers(2, 300), rate=st.floats(1e-3, 1e4))
def test_arrivals_have_the_rate_and_one_pattern(requests, rate):
    case = ArrivingTrace(requests, 64, 32, rate)
    arrivals = case.arrivals()
    assert len(arrivals) == requests and arrivals == case.arrivals() and arrivals[0] > 0
    assert arrivals == sorted(arrivals) and arrivals[-1] == pytest.approx(requests / rate)
    at_one = ArrivingTrace(requests, 64, 32, 1.0).arrivals()
    assert arrivals == pytest.approx([arrival / rate for arrival in at_one])


def test_arrivals_are_a_poisson_process():
    """Of an exponential distribution, the deviation is the mean, and a share of 1/e is above it."""
    arrivals = ArrivingTrace(20_000, 64, 32, 8.0).arrivals()
    gaps = [after - before for before, after in zip([0.0, *arrivals], arrivals, strict=False)]
    mean = statistics.mean(gaps)
    assert mean == pytest.approx(1 / 8) and statistics.stdev(gaps) == pytest.approx(mean, rel=0.03)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(1 / math.e, rel=0.03)


def test_the_requests_are_those_of_the_trace_at_every_rate():
    trace, case = Trace(60, 200, 24), ArrivingTrace(60, 200, 24, 8.0)
    (lone,), requests = case.rounds(1000)
    assert lone.arrival is None and [one.arrival for one in requests] == case.arrivals()
    assert [one._replace(arrival=None) for one in requests] == trace.rounds(1000)[-1]
    faster = ArrivingTrace(60, 200, 24, 0.3)
    assert (case.name, faster.name) == ("60 requests at 8/s, up to 200/24", "60 requests at 0.3/s, up to 200/24")
    assert len(case.lengths_at_once()) == 60 and len(ArrivingTrace(300, 200, 24, 8.0).lengths_at_once()) == 256


@pytest.mark.parametrize(("kind", "further"), [("trace", {}), ("rate", {"rate": 2.0})])
def test_a_row_is_of_the_kind_whose_fields_it_has(kind, further):
    row = {"trace": 6, "prompt": 64, "output": 9} | further
    case = from_row(row)
    assert vars(case) == row and kind == case.KIND


def test_latencies_of_requests_counted_by_hand():
    """Of two requests of three and four tokens, the second one got two of them in one step."""
    found = latencies([[0] * 3, [0] * 4], [[1.0, 1.5, 3.0], [2.0, 2.25, 2.5]])
    assert tuple(found) == LATENCIES
    assert [found["TTFT p50, ms"], found["TTFT p99, ms"]] == pytest.approx([1500, 1990])
    # 1 s and 1/6 s for each further token.
    assert [found["TPOT p50, ms"], found["TPOT p99, ms"]] == pytest.approx([1e3 * 3.5 / 6, 1e3 * (1 - 0.01 * 5 / 6)])
    assert found["ITL p99, ms"] == pytest.approx(1e3 * (1.5 - 0.03))  # of 0.25, 0.25, 0.5 and 1.5 s


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(0, 1e3), min_size=2, max_size=9), min_size=2, max_size=40))
def test_percentiles_are_those_of_numpy(gaps):
    times = [list(numpy.cumsum(of_one)) for of_one in gaps]
    found = latencies(gaps, times)
    first, between = [1e3 * at[0] for at in times], [1e3 * gap for at in times for gap in numpy.diff(at)]
    per_token = [1e3 * (at[-1] - at[0]) / (len(at) - 1) for at in times]
    expected = [numpy.percentile(values, percent) for values in (first, per_token) for percent in (50, 99)]
    assert [*found.values()] == pytest.approx([*expected, numpy.percentile(between, 99)], abs=1e-6)


class Answering:
    """In place of vLLM's engine: a step lasts SHORT and gives every request one token. It notes what is done.

    queued: whether it has a process of its own, whose outputs come to a queue.
    """

    def __init__(self, queued: bool, tokens: int) -> None:
        self.noted, self._tokens, self._left = [], tokens, {}
        self.renderer = SimpleNamespace(render_cmpl=list)
        self.engine_core = SimpleNamespace(outputs_queue=queue.Queue()) if queued else SimpleNamespace()

    def add_request(self, number: str, prompt, params, lora_request) -> None:
        self.noted.append((number, prompt, lora_request))
        if not self._left:
            self._begin()
        self._left[number] = self._tokens

    def has_unfinished_requests(self) -> bool:
        return bool(self._left)

    def step(self) -> list:
        if hasattr(self.engine_core, "outputs_queue"):
            self.engine_core.outputs_queue.get()
        else:
            time.sleep(SHORT)
        self.noted.append("step")
        done = [self._output(number) for number in self._left]
        self._left = {number: left - 1 for number, left in self._left.items() if left > 1}
        if self._left:
            self._begin()
        return done

    def _begin(self) -> None:
        if hasattr(self.engine_core, "outputs_queue"):
            threading.Timer(SHORT, self.engine_core.outputs_queue.put, [None]).start()

    @staticmethod
    def _output(number: str):
        return SimpleNamespace(request_id=number, outputs=[SimpleNamespace(token_ids=[7])])


@pytest.mark.parametrize("queued", [True, False], ids=["in another process", "in this process"])
def test_a_request_that_arrives_during_a_step_is_handed_over_at_once_or_after_the_step(queued):
    import vllm.sampling_params  # noqa: F401, which takes seconds that are not to be measured

    engine = Answering(queued, tokens=2)
    arrivals = [0.1, 0.1 + SHORT / 4, 0.1 + 6 * SHORT]
    sampling = [SimpleNamespace() for _ in arrivals]
    tokens, times = engine_arrivals.generate(engine, ["a", "b", "c"], sampling, ["x", "y", "z"], arrivals)
    first, second, third = ("0", "a", "x"), ("1", "b", "y"), ("2", "c", "z")
    within = [first, second, "step", "step"] if queued else [first, "step", second, "step", "step"]
    assert engine.noted == [*within, third, "step", "step"]
    assert tokens == [[7, 7]] * 3 and [len(of_one) for of_one in times] == [2, 2, 2]
    # The third one arrives while the engine is idle. Counted from the beginning, its first token took 7 steps and more.
    assert 0.9 * SHORT < times[2][0] < 6 * SHORT and times[2][1] - times[2][0] > 0.9 * SHORT
    assert times[1][0] > (0.7 if queued else 1.7) * SHORT
    assert all(params.output_kind.name == "DELTA" for params in sampling)


@pytest.mark.window
def test_vllms_client_takes_outputs_from_the_queue_that_arrivals_watch():
    from vllm.v1.engine.core_client import SyncMPClient

    output = SimpleNamespace(wave_complete=None)
    client = SimpleNamespace(outputs_queue=queue.Queue())
    client.outputs_queue.put(output)
    assert SyncMPClient.get_output(client) is output and not client.outputs_queue.queue


def compared(**milliseconds: float) -> Report:
    """The report of engines by name, all of whose latencies are so many milliseconds."""
    shape = shapes.load("tiny")
    case = shape.arriving(8, 12)
    plan = ComparisonPlan(shape, [case], [engines.Engine(name) for name in milliseconds], repetitions=1, cold=False)
    nothing = {"versions": {}, "platform": "none", "device": None, "compiled": []}
    started = {name: engines.Started(1.0, **nothing) for name in milliseconds}
    runs = {name: Run(None, 2.0, [], 300, dict.fromkeys(LATENCIES, ms)) for name, ms in milliseconds.items()}
    results = [EngineResult(case, name, run, [run], None) for name, run in runs.items()]
    return Report(record(plan, Comparison(plan.engines, started, dict.fromkeys(runs, 0), results), "the command"))


def test_a_report_has_each_latency_with_its_ratio_to_stock_and_the_number_of_requests():
    report = compared(opset=5.0, stock=4.0)
    rows = as_plain(report.speed())
    assert [row[""] for row in rows][:5] == [*LATENCIES] and rows[0]["case"] == "12 requests at 8/s, up to 64/32"
    assert all((row["stock"], row["opset"], row["opset to stock"]) == ("4.00", "5.00", "1.250\N{MULTIPLICATION SIGN}")
               for row in rows[:5])  # fmt: skip
    text = page([report], [], None)
    assert "arrive in a Poisson process" in text and "A case is requests x prompt" not in text


def names(*cases: str, rates=(), requests=None) -> list[str]:
    plan = _plan("tiny", cases, [], [], 1, True, False, False, rates, requests)
    return [case.name for case in plan.cases]


def test_a_rate_adds_a_case_and_others_are_named():
    at_8, at_4 = ("200 requests at 8/s, up to 64/32", "200 requests at 4/s, up to 64/32")
    assert names(rates=[8.0, 4.0, 8]) == [at_8, at_4]
    assert names("1x*", rates=[8.0]) == ["1x64/32", at_8]
    assert names("rate", rates=[8.0], requests=12) == [at_8.replace("200", "12")]
    assert names("trace", "batch") == names()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--rate", "0"), "a rate above 0 per second, not 0"),
        (("--rate", "-2"), "a rate above 0 per second, not -2"),
        (("--rate", "nan"), "a rate above 0 per second, not nan"),
        (("--rate", "inf"), "a rate above 0 per second, not inf"),
        (("--rate", "8", "--requests", "1"), "'--requests'"),
        (("--requests", "20"), "only requests at a rate have a number: add --rate"),
        (("--case", "rate"), "no case matches rate"),
        (("--case", "rate", "--case", "5x*", "--rate", "8"), "no case matches 5x*"),
        (("--model", "bloom-7b1", "--rate", "8"), "context is too short for the requests of a trace"),
        (("--rate", "8", "--from", "results.json"), "leave out --model, --rate"),
    ],
)
def test_a_rate_that_cannot_be_is_an_error_with_a_hint(words, hint):
    result = CliRunner().invoke(app, ["bench", "e2e", "--model", "tiny", *words])
    assert result.exit_code == 2 and hint in " ".join(result.output.replace("│", "").split())
