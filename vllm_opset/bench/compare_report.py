"""Reports of a comparison of engines: tables for the terminal, JSON, and a section of a documentation page."""

import datetime
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_opset.bench.compare import Comparison, Plan, Result
from vllm_opset.bench.report import commit
from vllm_opset.bench.text import describe_cpu, markdown_table, median, median_and_range, versions_text

GIB = 2**30
DIGITS = {"TTFT, s": 4, "TPOT, ms": 3, "output tokens/s": 0}

Table = tuple[list[str], list[list[str]]]


@dataclass(frozen=True)
class Report:
    """The report of one comparison. command: repeats the comparison."""

    plan: Plan
    found: Comparison
    command: str

    @property
    def machine(self) -> str:
        return next(iter(self.found.started.values())).device or describe_cpu()

    @property
    def missing(self) -> list[str]:
        """The cases without results, because the comparison was interrupted."""
        done = {result.case.name for result in self.found.results}
        return [case.name for case in self.plan.cases if case.name not in done]

    def as_json(self) -> dict:
        """Plain data: the whole plan, and every run."""
        return {
            "date": datetime.date.today().isoformat(),
            "commit": commit(),
            "command": self.command,
            "machine": self.machine,
            "shape": {"name": self.plan.shape.name, "config": dict(self.plan.shape.config)},
            "cold_caches": self.plan.cold,
            "apart": self.plan.apart,
            "repetitions": self.plan.repetitions,
            "missing": self.missing,
            "kv_cache_bytes": self.plan.shape.kv_cache_bytes(self.plan.cases),
            **self.found.as_json(),
        }

    def as_markdown(self) -> str:
        """A section with the command, both tables, and a legend."""
        lines = [
            f"## End to end: {self.plan.shape.name}, {self.plan.shape.dtype}",
            "",
            f"Made by `{self.command}` on {datetime.date.today().isoformat()}, commit {commit() or 'unknown'}.",
            f"{self.machine}. {'; '.join(self._described())}.",
            "",
            *markdown_table(*self.speed()),
            "",
            *markdown_table(*self.starts()),
            "",
            self.legend(),
        ]
        return "\n".join(lines) + "\n"

    def speed(self, spread: bool = True) -> Table:
        """(columns, rows): three rows for each case, and a column with the first engine's ratio to each other engine.

        spread: whether to add the range of the runs to each median.
        """
        first, *others = [engine.name for engine in self.found.engines]
        compared = [column for other in others for column in (other, f"{first} to {other}")]
        rows = [row for results in self._by_case() for row in _rows(results, spread)]
        return ["case", "", first, *compared, *(["same tokens"] if others else [])], rows

    def starts(self) -> Table:
        """(columns, rows): a row for each engine."""
        columns = ["engine", "start-up, s", "peak memory, GiB", "kernels compiled by first requests", "later"]
        rows = []
        for name, started in self.found.started.items():
            results = [result for result in self.found.results if result.engine == name]
            first = Counter(kernel for result in results for kernel in result.first.compiled)
            later = Counter(kernel for result in results for run in result.runs for kernel in run.compiled)
            memory = f"{self.found.peak_bytes[name] / GIB:.1f}"
            rows.append([name, f"{started.seconds:.1f}", memory, _counted(first), _counted(later)])
        return columns, rows

    def legend(self, spread: bool = True) -> str:
        repetitions = self.plan.repetitions
        runs = "One run" if repetitions == 1 else f"Median of {repetitions} runs{' (least to most)' if spread else ''}"
        caches = "empty" if self.plan.cold else "not emptied"
        memory = "by PyTorch's allocator" if next(iter(self.found.started.values())).device else "resident in a worker"
        up = (
            "One engine is up at a time, so what drifts does not meet all alike"
            if self.plan.apart
            else "All engines are up, runs interleave, and the engines that do not run are stopped"
        )
        interrupted = f"Interrupted before {', '.join(self.missing)}. " if self.missing else ""
        return (
            f"{interrupted}A case is requests x prompt tokens / output tokens, greedy unless sampled. {runs} "
            "after one that does not count. TTFT: until every request has its first token. TPOT: the rest of the time "
            f"over the rest of the tokens. Random weights, no prefix caching. {up}; before each run, one prompt is "
            "answered that does not count. Same tokens: requests with the greedy tokens of the first engine, which in "
            f"bfloat16 no engine owes. Start-up: from the start of the process, caches of compiled code {caches}. Peak "
            f"memory: {memory}. First requests: the run that does not count, of every case. Compiled: Triton kernels, "
            "also those that come from its cache."
        )

    def _described(self) -> Iterator[str]:
        for engine in self.found.engines:
            started = self.found.started[engine.name]
            settings = " ".join(f"{name}={value}" for name, value in {**engine.env, **engine.args}.items())
            versions = versions_text(started.versions)
            yield f"{engine.name}: {settings}{', ' if settings else ''}{versions}, `{started.platform}`"

    def _by_case(self) -> Iterator[list[Result]]:
        for case in self.plan.cases:
            if case.name not in self.missing:
                yield [result for result in self.found.results if result.case == case]


def as_plain(table: Table) -> list[dict[str, str]]:
    """The rows as dictionaries by column."""
    columns, rows = table
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _rows(results: list[Result], spread: bool) -> Iterator[list[str]]:
    """The rows of one case."""
    first, *others = results
    text = median_and_range if spread else median
    for metric, values in first.metrics().items():
        row = [text(values, DIGITS[metric])]
        for other in others:
            theirs = other.metrics()[metric]
            row += [text(theirs, DIGITS[metric]), f"{_ratio(values, theirs):.3f}x"]
        head = metric == next(iter(DIGITS))
        same = [_same(others) if head else ""] if others else []
        yield [first.case.name if head else "", metric, *row, *same]


def _ratio(values: list[float], others: list[float]) -> float:
    return statistics.median(values) / statistics.median(others)


def _same(others: list[Result]) -> str:
    return ", ".join(f"{other.same} of {other.case.batch}" for other in others if other.same is not None)


def _counted(kernels: Counter[str]) -> str:
    names = ", ".join(f"{count} of {name}" if count > 1 else name for name, count in kernels.items())
    return f"{kernels.total()} ({names})" if kernels else "0"
