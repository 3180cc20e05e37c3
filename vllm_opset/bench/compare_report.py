"""Reports of comparisons of engines, made of their JSON: tables for the terminal, and a page of documentation."""

import datetime
import itertools
import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from vllm_opset.bench.cases import KINDS, from_row
from vllm_opset.bench.compare import Comparison, ComparisonPlan
from vllm_opset.bench.figures import ACCEPTANCE, DIGITS, RATE
from vllm_opset.bench.format import (
    TIMES,
    describe_cpu,
    format_versions,
    markdown_table,
    median,
    median_and_range,
)
from vllm_opset.bench.report import commit, generated

GIB = 2**30
BASELINE = "stock"
# The digits after the point of fewer output tokens per second than this.
FEW_PER_SECOND, DIGITS_OF_FEW = 100, 2
LEGEND = (
    "The mean acceptance length is the number of tokens of a step, if tokens are drafted. Weights are random, and "
    "there is no prefix caching. Before each run, one prompt is answered that does not count. Start-up is measured "
    "from the start of the process. First requests are the run that does not count, of every case. Compiled kernels "
    "are Triton's, also those that come from its cache. bfloat16 does not guarantee that engines give the same tokens."
)

Table = tuple[list[str], list[list[str]]]


def record(plan: ComparisonPlan, found: Comparison, command: str, conditions: str | None = None) -> dict:
    """A comparison as plain data: the whole plan, and every run.

    command: repeats the comparison. conditions: what a reader must know of the machine while it ran.
    """
    done = {result.case.name for result in found.results}
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": command,
        "machine": next(iter(found.started.values())).device or describe_cpu(),
        "conditions": conditions,
        "shape": {"name": plan.shape.name, "config": dict(plan.shape.config)},
        "cold_caches": plan.cold,
        "apart": plan.apart,
        "at_once": plan.at_once,
        "repetitions": plan.repetitions,
        "missing": [case.name for case in plan.cases if case.name not in done],
        "kv_cache_bytes": plan.shape.kv_cache_bytes(plan.cases),
        **found.as_json(),
    }


@dataclass(frozen=True)
class Report:
    """The report of one comparison. run: its record."""

    run: Mapping

    @property
    def title(self) -> str:
        return f"{self.run['shape']['name']}, {self.run['shape']['config']['torch_dtype']}"

    @property
    def engines(self) -> list[str]:
        """The baseline, then the others. The baseline is stock vLLM, or the first engine of a comparison without it."""
        names = [engine["name"] for engine in self.run["engines"]]
        return sorted(names, key=lambda name: name != BASELINE) if BASELINE in names else names

    @property
    def _asked_first(self) -> str:
        """The engine with whose tokens the others' are compared."""
        return self.run["engines"][0]["name"]

    def by_case(self) -> dict[str, dict[str, Mapping]]:
        """The results by case and engine."""
        found: dict[str, dict[str, Mapping]] = {}
        for result in self.run["results"]:
            found.setdefault(result["case_name"], {})[result["engine"]] = result
        return found

    def speed(self, spread: bool = True) -> Table:
        """(columns, rows): a row for each metric of each case, with every engine's ratio to the baseline.

        spread: whether to add the range of the runs to each median.
        """
        baseline, *others = self.engines
        compared = [column for other in others for column in (other, f"{other} to {baseline}")]
        rows = [row for case, results in self.by_case().items() for row in self._rows(case, results, spread)]
        return ["case", "", baseline, *compared, *(["same tokens"] if others else [])], rows

    def starts(self) -> Table:
        """(columns, rows): a row for each engine."""
        columns = ["engine", "start-up, s", "peak memory, GiB", "kernels compiled by first requests", "later"]
        return columns, [[name, *self._start(name)] for name in self.engines]

    def legend(self) -> str:
        """What of the comparison one must know to read its tables."""
        run = self.run
        runs = "One run" if run["repetitions"] == 1 else f"Medians of {run['repetitions']} runs (least to most)"
        up = (
            "one engine was up at a time, so what drifts does not meet all alike"
            if run["apart"]
            else "all engines were up, runs interleaved, and the engines that did not run were stopped"
        )
        starts = " All engines started at the same time, so each start took longer." if run.get("at_once") else ""
        caches = "empty" if run["cold_caches"] else "not emptied"
        interrupted = f" Interrupted before {', '.join(run['missing'])}." if run["missing"] else ""
        for case, number in self.cut_short().items():
            interrupted += f" {case} has {number} run{'s' if number > 1 else ''} alone."
        same = f" Same tokens: requests with the greedy tokens of {self._asked_first}." if len(self.engines) > 1 else ""
        memory = "PyTorch's allocator" if run["engines"][0]["device"] else "resident in a worker"
        return f"{runs}; {up}. Caches of compiled code were {caches}.{starts} Peak memory: {memory}.{same}{interrupted}"

    def cut_short(self) -> dict[str, int]:
        """The runs of each case that has fewer than were planned. Old records have no single runs."""
        runs = {case: next(iter(results.values()))["runs"] for case, results in self.by_case().items()}
        numbers = {case: len(of_case) for case, of_case in runs.items() if of_case is not None}
        return {case: number for case, number in numbers.items() if number < self.run["repetitions"]}

    @property
    def is_complete(self) -> bool:
        return not self.run["missing"] and not self.cut_short()

    @property
    def heading(self) -> str:
        return f"{self.title}, at {self.run['commit'] or 'an unknown commit'}"

    def switches(self, name: str) -> str:
        """An engine's name, with opset's variables in its environment."""
        (env,) = (engine["env"] for engine in self.run["engines"] if engine["name"] == name)
        given = " ".join(f"`{variable}={value}`" for variable, value in env.items() if variable.startswith("OPSET_"))
        return f"{name}: {given}" if given else name

    def rates(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Each engine beside the baseline, and its output tokens per second to the baseline's, by case."""
        baseline, *others = self.engines
        for other in others:
            yield (
                other,
                {
                    case: _ratio(of[other]["metrics"][RATE], of[baseline]["metrics"][RATE])
                    for case, of in self.by_case().items()
                },
            )

    def section(self) -> list[str]:
        """The lines of a page's section: conditions, command, engines and both tables."""
        run = self.run
        return [
            f"## {self.heading}",
            "",
            f"{run['machine']}, {run['date']}. {self.legend()}",
            *(["", run["conditions"]] if run["conditions"] else []),
            "",
            "```",
            run["command"],
            "```",
            "",
            *(f"- {line}" for line in self._described()),
            "",
            *markdown_table(*self.speed()),
            "",
            *([*markdown_table(*self.starts()), ""] if any(any(row[1:]) for row in self.starts()[1]) else []),
        ]

    def _described(self) -> Iterator[str]:
        for engine in self.run["engines"]:
            settings = " ".join(f"{name}={value}" for name, value in {**engine["env"], **engine["args"]}.items())
            versions = format_versions(engine["versions"])
            yield f"{engine['name']}: `{engine['platform']}`, {versions}{f'; `{settings}`' if settings else ''}"

    def _start(self, name: str) -> list[str]:
        (engine,) = (engine for engine in self.run["engines"] if engine["name"] == name)
        results = [result for result in self.run["results"] if result["engine"] == name and result["first"]]
        first = Counter(kernel for result in results for kernel in result["first"]["compiled"])
        later = Counter(kernel for result in results for run in result["runs"] for kernel in run["compiled"])
        return [
            "" if engine["seconds"] is None else f"{engine['seconds']:.1f}",
            "" if engine["peak_bytes"] is None else f"{engine['peak_bytes'] / GIB:.1f}",
            *((_counted(first), _counted(later)) if results else ("", "")),
        ]

    def _rows(self, case: str, results: Mapping[str, Mapping], spread: bool) -> Iterator[list[str]]:
        """The rows of one case."""
        baseline, *others = self.engines
        text = median_and_range if spread else median
        counted = [result["same"] for name, result in results.items() if name != self._asked_first]
        requests = from_row(results[baseline]["case"]).requests
        same = ", ".join(f"{count} of {requests}" for count in counted if count is not None)
        drafts = any(set(of["metrics"].get(ACCEPTANCE, ())) - {1} for of in results.values())
        for metric, values in results[baseline]["metrics"].items():
            if metric == ACCEPTANCE and not drafts:
                continue
            is_few = metric == RATE and statistics.median(values) < FEW_PER_SECOND
            digits = DIGITS_OF_FEW if is_few else DIGITS[metric]
            row = [text(values, digits)]
            for other in others:
                theirs = results[other]["metrics"][metric]
                row += [text(theirs, digits), _ratio(theirs, values)]
            head = metric == next(iter(results[baseline]["metrics"]))
            yield [case if head else "", metric, *row, *([same if head else ""] if others else [])]


def legend(reports: Iterable[Report]) -> str:
    """What one must know to read the tables of these comparisons, with the kinds of cases that they have."""
    found = {type(from_row(result["case"])) for report in reports for result in report.run["results"]}
    return " ".join([*(kind.LEGEND for kind in reversed(KINDS) if kind in found), LEGEND])


def page(reports: Sequence[Report], sources: Sequence[str], picture: str | None) -> str:
    """A page of documentation with all comparisons. sources, picture: the names of files beside it."""
    lines = [
        f"# Engines: {reports[0].run['machine']}",
        "",
        generated("bench e2e", sources, picture),
        "",
        *([f"![Engines beside stock vLLM]({picture})", ""] if picture else []),
        legend(reports),
        "",
        "## Output tokens per second to stock vLLM's",
        "",
        "The newest comparisons come first. Each has a section below, which says what its engines are.",
        "",
        *markdown_table(*overview(reports)),
        "",
        *(line for report in reports for line in report.section()),
    ]
    return "\n".join(lines)


def overview(reports: Sequence[Report]) -> Table:
    """(columns, rows): a row for each engine of each comparison with stock vLLM, the newest first; a column by case."""
    used: Counter[str] = Counter()
    rows: list[list[tuple[str, str, Mapping[str, str]]]] = []
    for report in reports:
        anchor = _anchor(report.heading)
        link = f"[{report.heading}](#{anchor}{f'-{used[anchor]}' if used[anchor] else ''})"
        used[anchor] += 1
        if report.engines[0] == BASELINE:
            rows.append([(link, report.switches(engine), rates) for engine, rates in report.rates()])
    newest_first = list(itertools.chain(*reversed(rows)))
    cases = cases_in_order([rates for *_, rates in newest_first])
    table = [[link, switches, *(rates.get(case, "") for case in cases)] for link, switches, rates in newest_first]
    return ["comparison", "engine", *cases], table


def cases_in_order(comparisons: Iterable[Collection[str]]) -> list[str]:
    """The cases of all comparisons, in the order of the longest."""
    return list(dict.fromkeys(itertools.chain(*sorted(comparisons, key=len, reverse=True))))


def _anchor(heading: str) -> str:
    """What GitHub makes of a heading's text."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def as_plain(table: Table) -> list[dict[str, str]]:
    """The rows as dictionaries by column."""
    columns, rows = table
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _ratio(values: Sequence[float], to: Sequence[float]) -> str:
    """The ratio of two medians."""
    return f"{statistics.median(values) / statistics.median(to):.3f}{TIMES}"


def _counted(kernels: Counter[str]) -> str:
    names = ", ".join(f"{count} of {name}" if count > 1 else name for name, count in kernels.items())
    return f"{kernels.total()} ({names})" if kernels else "0"
