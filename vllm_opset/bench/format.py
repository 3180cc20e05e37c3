"""Text for the reports of benchmarks: tables in Markdown, numbers with their spread, and the machine's name."""

import shlex
import statistics
import sys
from collections.abc import Collection, Iterable, Sequence

import psutil

from vllm_opset.platform.cpu import machine

TIMES = "\N{MULTIPLICATION SIGN}"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    head = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return [*head, *("| " + " | ".join(row) + " |" for row in rows)]


def median(values: Sequence[float], digits: int) -> str:
    """The median as text. digits: after the decimal point."""
    return f"{statistics.median(values):,.{digits}f}"


def median_and_range(values: Sequence[float], digits: int) -> str:
    """The median, and the least and the greatest value if there are several. digits: after the decimal point."""
    if len(values) == 1:
        return median(values, digits)
    low, high = min(values), max(values)
    return f"{median(values, digits)} ({low:,.{digits}f} to {high:,.{digits}f})"


def format_versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def command_line(outputs: Collection[str]) -> str:
    """The words of this process's command line, without the options `outputs` and their values, which are paths."""
    kept, words = [], iter(sys.argv[1:])
    for word in words:
        name, _, value = word.partition("=")
        if name not in outputs:
            kept.append(word)
        elif not value:
            next(words, None)
    return shlex.join(kept)


def describe_cpu() -> str:
    """The cores that this process may use, the processor with its vector and matrix instructions, and the memory."""
    cores, memory = machine.physical_cores(), round(psutil.virtual_memory().total / 2**30)
    found = machine.processor()
    return f"{cores} cores of an {found.name} with {found.vectors}, {memory} GiB"
