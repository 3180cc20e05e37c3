"""What the serving benchmark found: as tables on the terminal, as JSON, and as Markdown for the documentation."""

import dataclasses
import datetime
import platform
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

MACHINE_FLAGS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 with bf16", "avx512f": "AVX-512", "avx2": "AVX2"}


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
    """All of one comparison. The first engine of every case is opset. threads: None for each engine's own choice."""

    machine: str
    commit: str | None
    threads: int | None
    repetitions: int
    command: str
    versions: dict[str, dict[str, str]]
    results: list[Result]

    def as_json(self) -> dict:
        """Plain data."""
        return {"date": datetime.date.today().isoformat(), **dataclasses.asdict(self)}

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
    versions = "; ".join(f"{engine}: {_versions(of_engine)}" for engine, of_engine in run.versions.items())
    lines = [
        f"Made by `{run.command}` on {datetime.date.today().isoformat()}, commit {run.commit or 'unknown'}, on "
        f"{run.machine}; {run.policy()}. {versions}.",
        "",
        f"Output tokens per second: the median of {run.repetitions} runs, and the least and the most. The runs of the "
        "engines were interleaved, and the engines that did not run were stopped.",
        "",
        "| " + " | ".join(run.columns()) + " |",
        "|---" * len(run.columns()) + "|",
        *("| " + " | ".join(row) + " |" for row in run.rows()),
    ]
    return "\n".join(lines) + "\n"


def describe_machine() -> str:
    """Cores, processor, what it has for matrices, and memory."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    vectors = next((name for flag, name in MACHINE_FLAGS.items() if flag in flags), "no AVX2")
    cores, memory = psutil.cpu_count(), round(psutil.virtual_memory().total / 2**30)
    return f"{cores} cores of an {model.replace('(R)', '')} with {vectors}, {memory} GiB"


def _rate(result: Result) -> str:
    digits = 0 if result.rate >= 100 else 1
    return f"{result.rate:,.{digits}f} ({min(result.rates):,.{digits}f} to {max(result.rates):,.{digits}f})"


def _sameness(results: list[Result]) -> str:
    known = [result.same_tokens for result in results if result.same_tokens is not None]
    return "" if not known else "yes" if all(known) else "no"


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
