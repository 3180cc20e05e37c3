"""A benchmark's results as tables, as JSON, and as a page of documentation."""

import dataclasses
import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from vllm_opset.bench import random_cases
from vllm_opset.bench.ceilings import Ceilings
from vllm_opset.bench.format import describe_cpu, format_versions, markdown_table
from vllm_opset.bench.measure import Result
from vllm_opset.kernel import REFERENCE

PACKAGES = ("vllm-opset", "torch", "triton", "vllm", "flashinfer-python")
MICROSECOND = 1e-6
COMPILED = "vllm_compiled"


def versions() -> dict[str, str]:
    """The versions of Python and of the installed packages among PACKAGES."""
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def commit() -> str | None:
    """The commit of the checkout that this runs from, marked if it has changes; None if it is not known.

    OPSET_COMMIT overrides it for a copy without history, for example on a borrowed machine.
    """
    if "OPSET_COMMIT" in os.environ:
        return os.environ["OPSET_COMMIT"]
    try:
        # The environment of an installed copy may lie in the repository of another project, which does not track it.
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        return _git("describe", "--always", "--dirty", "--abbrev=12")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*words: str) -> str:
    """What git prints in the folder of this module. Raises CalledProcessError if it fails."""
    command = ["git", "-C", str(Path(__file__).parent), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def today() -> str:
    return datetime.date.today().isoformat()


@dataclass(frozen=True)
class OpsReport:
    """The report of one run.

    ceilings: None if they are not known. skipped: peers that were not used, and why. command: repeats the run.
    conditions: what a reader must know of the machine or of the results. random: the number of random problems and
    their seed, or None for the cases of the contracts.
    """

    device: str
    ceilings: Ceilings | None
    results: list[Result]
    skipped: dict[str, str]
    command: str = ""
    conditions: str | None = None
    random: Mapping[str, int] | None = None
    date: str = field(default_factory=today)
    commit: str | None = field(default_factory=commit)
    versions: dict[str, str] = field(default_factory=versions)

    @classmethod
    def from_json(cls, run: Mapping) -> "OpsReport":
        """The report that `as_json` was made of."""
        known, limits = dict(run), run["ceilings"]
        known.pop("comparisons", None)  # made of the results
        ceilings = limits and Ceilings(**limits | {"dtype": getattr(torch, limits["dtype"])})
        results = [Result(**result) for result in run["results"]]
        return cls(**known | {"ceilings": ceilings, "results": results})

    def as_json(self) -> dict:
        """Plain data; times in seconds."""
        known = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        measured = self.ceilings and {key: rate for key, rate in vars(self.ceilings).items() if rate is not None}
        ceilings = measured and measured | {"dtype": _plain(self.ceilings.dtype)}
        known |= {"ceilings": ceilings, "results": [vars(result) for result in self.results]}
        if self.random is None:
            del known["random"]
        else:
            known["comparisons"] = [one.as_json() for one in random_cases.comparisons(self.results)]
        return known

    def described(self) -> str:
        """One line about the machine and its ceilings."""
        if self.ceilings is None:
            return self.device
        fp8 = self.ceilings.fp8_flops_per_second
        return (
            f"{self.device}: reading {_rate(self.ceilings.bytes_per_second)}B/s, "
            f"{_plain(self.ceilings.dtype)} matmul {_rate(self.ceilings.flops_per_second)}FLOP/s"
            f"{'' if fp8 is None else f', fp8 matmul {_rate(fp8)}FLOP/s'}"
        )

    def tables(self) -> Iterator[tuple[str, list[str], list[dict]]]:
        """(op, columns, rows): a row per case, a column per implementation, times in microseconds.

        For random problems: comparisons of the kernel that serves with the others.
        """
        if self.random is not None:
            yield from random_cases.tables(self.results)
            return
        for op in dict.fromkeys(result.op for result in self.results):
            of_op = [result for result in self.results if result.op == op]
            peers_last = sorted(of_op, key=lambda result: result.peer)
            implementations = list(dict.fromkeys(result.implementation for result in peers_last))
            rows = [
                {"case": case, "floor": _floor(of_op, case)}
                | {name: _cell(of_op, case, name) for name in implementations}
                for case in dict.fromkeys(result.case for result in of_op)
            ]
            yield op, ["case", "floor", *implementations], rows

    def speed_ups(self, op: str) -> tuple[bool, list[float]]:
        """(whether the peer is vLLM's compiled kernel, the speed-up of each case).

        Without results of that kernel, each case is compared with its fastest peer. opset's fastest kernel counts, with
        the variant that its table takes.
        """
        timed = [result for result in self.results if result.op == op and result.seconds is not None]
        compiled = any(result.implementation == COMPILED for result in timed)
        ours, theirs = {}, {}
        for result in timed:
            if result.peer and (result.implementation == COMPILED or not compiled):
                theirs[result.case] = min(result.seconds, theirs.get(result.case, result.seconds))
            elif not result.peer and ":" not in result.implementation and result.implementation != REFERENCE:
                ours[result.case] = min(result.seconds, ours.get(result.case, result.seconds))
        return compiled, [theirs[case] / seconds for case, seconds in ours.items() if case in theirs]

    def section(self) -> list[str]:
        """The lines of a page's section: the machine and the command, a table for each op, and notes."""
        lines = [
            f"## At {self.commit or 'an unknown commit'}, {self.date}",
            "",
            f"{self.described()}. {format_versions(self.versions)}.",
            *(["", self.conditions] if self.conditions else []),
            "",
            "```",
            self.command,
            "```",
        ]
        for op, columns, rows in self.tables():
            table = markdown_table(columns, ([row[column] for column in columns] for row in rows))
            lines += ["", f"### {op}", "", *table]
        if notes := self.notes():
            lines += ["", "Notes:", "", *(f"- {note}" for note in notes)]
        again = next((result.reproduce for result in self.results if not result.peer), None)
        return [*lines, "", *([f"One case again, and likewise the others: `{again}`", ""] if again else [])]

    def notes(self) -> list[str]:
        """Notes on results that are off the reference, doubtful times, cases that were not timed, and unused peers."""
        wrong: dict[str, dict[str, str]] = {}
        cases: dict[str, list[str]] = {}
        for result in self.results:
            name = f"{result.op}, {result.implementation}"
            if result.check:
                wrong.setdefault(name, {})[result.case] = result.check
            if result.doubt:
                cases.setdefault(f"{name}: {result.doubt}", []).append(result.case)
            if result.skipped:
                cases.setdefault(f"{name} was not timed: {result.skipped}", []).append(result.case)
        return [
            *(_wrong_results(name, checks) for name, checks in wrong.items()),
            *(f"{note} ({'; '.join(of_note)})" for note, of_note in cases.items()),
            *(f"{name} was not used: {reason}" for name, reason in self.skipped.items()),
        ]


def _wrong_results(name: str, checks: Mapping[str, str]) -> str:
    """One note on all wrong results of an implementation: what is wrong in the first case, and the other cases."""
    (first, check), *others = checks.items()
    note = f"{name}: {check} ({first})"
    return f"{note}. Its results are also off in {'; '.join(case for case, _ in others)}" if others else note


LEGEND = (
    "A cell has the microseconds of one call, ± half the distance between the quartiles. Its percentage is the floor's "
    "share of that time. The floor is the time to move the bytes at the reading rate, or to compute the FLOP at the "
    "matmul rate, whichever is longer. Products whose activations are quantised to fp8 or int8 have the matmul "
    "rate of fp8, if it was measured. `!` marks a result that is further from the reference than the contract "
    "allows. `?` marks a time that says little; a note gives the reason. If a kernel has variants, the cell names the "
    "one that ran the case. A column `kernel:variant` is a variant that an override would ask for."
)


def page(reports: list[OpsReport], sources: Sequence[str], picture: str | None) -> str:
    """A page of documentation with all runs. sources, picture: the names of files beside it."""
    lines = [
        f"# Kernels: {reports[0].device}",
        "",
        generated("bench", sources, picture),
        "",
        *([f"![Speed-up of each op]({picture})", ""] if picture else []),
        LEGEND,
        "",
        *(line for report in reports for line in report.section()),
    ]
    return "\n".join(lines)


def generated(command: str, sources: Sequence[str], picture: str | None) -> str:
    """The sentence of a page that says how to generate it. sources, picture: the names of files beside it."""
    plot = f" --plot {picture}" if picture else ""
    call = f"vllm-opset {command} {' '.join(f'--from {source}' for source in sources)} --markdown FILE{plot}"
    again = f" from {' and '.join(f'[{source}]({source})' for source in sources)} by `{call}`" if sources else ""
    return f"This page is generated{again}; what is written into it by hand is lost."


def device_name(device: str) -> str:
    """The name of the hardware."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{describe_cpu()}, {torch.get_num_threads()} threads"


def _floor(results: list[Result], case: str) -> str:
    known = [result.floor for result in results if result.case == case and result.floor is not None]
    return f"{known[0] / MICROSECOND:.1f}" if known else ""


def _cell(results: list[Result], case: str, implementation: str) -> str:
    found = [result for result in results if (result.case, result.implementation) == (case, implementation)]
    if not found:
        return ""
    result = found[0]
    if result.seconds is None:
        return "failed !" if result.check else "not timed"
    time, spread = result.seconds / MICROSECOND, result.spread / MICROSECOND
    variant = f" ({result.variant})" if result.variant and ":" not in implementation else ""
    marks = f"{' !' if result.check else ''}{' ?' if result.doubt else ''}"
    return f"{time:.2f} ± {spread:.2f}, {result.share:.0%}{variant}{marks}"


def _rate(value: float) -> str:
    """The value with the unit prefix that suits a GPU or a CPU."""
    for size, prefix in ((1e15, "P"), (1e12, "T")):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value / 1e9:.3g} G"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
