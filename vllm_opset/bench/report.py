"""A benchmark's results as a table, as JSON, as a page of documentation, and as a roofline picture."""

import dataclasses
import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_opset.bench.ceilings import Ceilings
from vllm_opset.bench.measure import Result
from vllm_opset.bench.text import describe_cpu, markdown_table, versions_text

PACKAGES = ("vllm-opset", "torch", "triton", "vllm", "flashinfer-python")
MICROSECOND = 1e-6


@dataclass(frozen=True)
class Report:
    """The report of one run. skipped: peers that were not used, and why."""

    device: str
    ceilings: Ceilings
    results: list[Result]
    skipped: dict[str, str]

    def as_json(self) -> dict:
        """Plain data; times in seconds."""
        return {
            "date": datetime.date.today().isoformat(),
            "commit": commit(),
            "device": self.device,
            "versions": versions(),
            "ceilings": {
                "read_bytes_per_second": self.ceilings.bytes_per_second,
                f"matmul_{_plain(self.ceilings.dtype)}_flops_per_second": self.ceilings.flops_per_second,
            },
            "peers_not_used": self.skipped,
            "results": [
                dataclasses.asdict(result) | {"share": result.share, "doubt": result.doubt} for result in self.results
            ],
        }

    def described(self) -> str:
        """One line about the machine and its ceilings."""
        return (
            f"{self.device}: reading {_rate(self.ceilings.bytes_per_second)}B/s, "
            f"{_plain(self.ceilings.dtype)} matmul {_rate(self.ceilings.flops_per_second)}FLOP/s"
        )

    def tables(self) -> Iterator[tuple[str, list[str], list[dict]]]:
        """(op, columns, rows): a row per case, a column per implementation, times in microseconds."""
        for op in dict.fromkeys(result.op for result in self.results):
            of_op = [result for result in self.results if result.op == op]
            implementations = list(dict.fromkeys(result.implementation for result in of_op))
            rows = [
                {"case": case, "floor": _floor(of_op, case)}
                | {name: _cell(of_op, case, name) for name in implementations}
                for case in dict.fromkeys(result.case for result in of_op)
            ]
            yield op, ["case", "floor", *implementations], rows

    def as_markdown(self, command: str, picture: str | None) -> str:
        """A page: the machine and the command, a table for each op, notes, and the commands to repeat a case."""
        lines = [
            f"# {self.device}",
            "",
            f"Made by `{command}` on {datetime.date.today().isoformat()}, commit {commit() or 'unknown'}.",
            f"{self.described()}. Python {platform.python_version()}, {versions_text(versions())}.",
            "",
            *([f"![roofline]({picture})", ""] if picture else []),
            LEGEND,
        ]
        for op, columns, rows in self.tables():
            table = markdown_table(columns, ([row[column] for column in columns] for row in rows))
            lines += ["", f"## {op}", "", *table]
        if notes := self.notes():
            lines += ["", "## Notes", "", *(f"- {note}" for note in notes)]
        again = [result.reproduce for result in self.results if not result.peer]
        lines += ["", "<details><summary>One case again</summary>", "", "```", *again, "```", "", "</details>"]
        return "\n".join(lines) + "\n"

    def notes(self) -> list[str]:
        """Notes on results that are off the reference, doubtful times, cases that were not timed, and unused peers."""
        cases: dict[str, list[str]] = {}
        for result in self.results:
            if result.check:
                cases.setdefault(f"{result.op}, {result.implementation}: {result.check}", []).append(result.case)
            if result.doubt:
                cases.setdefault(f"{result.op}, {result.implementation}: {result.doubt}", []).append(result.case)
            if result.skipped:
                note = f"{result.op}, {result.implementation} was not timed: {result.skipped}"
                cases.setdefault(note, []).append(result.case)
        return [
            *(f"{note} ({'; '.join(of_note)})" for note, of_note in cases.items()),
            *(f"{name} was not used: {reason}" for name, reason in self.skipped.items()),
        ]


LEGEND = (
    "Microseconds of one call, ± half the distance between the quartiles, and the share of the ceiling: floor over "
    "time. floor: the bytes that must move over the reading rate, or the FLOP over the matmul rate, whichever is "
    "longer. `!` marks a result that is further from the reference than the contract allows, `?` a time that says "
    "little, for a reason that is noted."
)


def versions() -> dict[str, str]:
    """The versions of the installed packages among PACKAGES."""
    installed = {}
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
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def device_name(device: str) -> str:
    """The name of the hardware."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{describe_cpu()}, {torch.get_num_threads()} threads"


def draw(report: Report, file: Path) -> None:
    """Draw the roofline: FLOP/s over FLOP per byte, with a colour for each implementation."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    timed = [result for result in report.results if result.seconds and result.flops]
    intensities = [result.flops / result.bytes for result in timed]
    reading, computing = report.ceilings.bytes_per_second, report.ceilings.flops_per_second
    low, ridge = min(intensities) / 2, computing / reading
    axes.loglog(
        [low, ridge, max(*intensities, 2 * ridge)], [low * reading, computing, computing], "k-", label="ceiling"
    )
    for name in dict.fromkeys(result.implementation for result in timed):
        of_name = [result for result in timed if result.implementation == name]
        axes.loglog(
            [result.flops / result.bytes for result in of_name],
            [result.flops / result.seconds for result in of_name],
            "o", label=name, alpha=0.6, markersize=5 if of_name[0].peer else 7,
        )  # fmt: skip
    axes.set(xlabel="FLOP per byte", ylabel="FLOP/s", title=report.described())
    axes.grid(which="major", alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


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
    return f"{time:.2f} ± {spread:.2f}, {result.share:.0%}{' !' if result.check else ''}{' ?' if result.doubt else ''}"


def _rate(value: float) -> str:
    """The value with the unit prefix that suits a GPU or a CPU."""
    return f"{value / 1e12:.3g} T" if value >= 1e12 else f"{value / 1e9:.3g} G"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
