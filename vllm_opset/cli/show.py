"""The output of the commands: rich tables and lists for people, JSON for programs."""

import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
# Widths in characters: one that no table reaches, and one below which a long list's table has columns of a few words.
UNLIMITED, NARROW = 100_000, 120
INDENT = 2


def print_json(value: Any) -> None:
    """Print JSON on standard output, and nothing else there."""
    print(json.dumps(value, indent=2, default=str))


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], listed_if_narrow: bool = False
) -> None:
    """Print one row per mapping, whose keys are the column names. Brackets in a cell are text, not rich's markup.

    A table fits a terminal, or the variable COLUMNS. In a file or a pipe each row is one line, so that grep finds it.
    listed_if_narrow: print a list instead of a table where fewer than NARROW characters fit into a line.
    """
    cells = [{column: "" if row[column] is None else str(row[column]) for column in columns} for row in rows]
    console = Console(width=_width())
    if listed_if_narrow and console.width < NARROW:
        console.print(Text(title, style="bold"), *_listed(columns, cells), sep="\n")
    else:
        console.print(_table(title, columns, cells))


def _width() -> int:
    """The width of the terminal or of COLUMNS. COLUMNS=0 counts as unset, since rich would print nothing."""
    asked = os.environ.get("COLUMNS", "")
    fits = sys.stdout.isatty() or (asked.isdecimal() and int(asked) > 0)
    return shutil.get_terminal_size().columns if fits else UNLIMITED


def _table(title: str, columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> Table:
    table = Table(title=Text(title), title_justify="left", title_style="bold", header_style="bold", expand=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "op")  # overrides take an op's whole name
    for row in rows:
        table.add_row(*(Text(row[column]) for column in columns))
    return table


def _listed(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> Iterator[RenderableType]:
    """The rows below their first cell. The second one comes before the others, of which the last has its own line."""
    first, second, *others, last = columns
    label = max((len(row[second]) for row in rows), default=0)
    for head, of_head in itertools.groupby(rows, key=lambda row: row[first]):
        yield Text(head, style="bold")
        grid = Table.grid(padding=(0, INDENT, 0, 0))
        grid.add_column(width=0)
        grid.add_column(width=min(label, NARROW // 6), overflow="fold")
        grid.add_column(overflow="fold")
        for row in of_head:
            lines = ("; ".join(f"{name}: {row[name]}" for name in names if row[name]) for names in (others, [last]))
            grid.add_row("", Text(row[second]), Text("\n".join(filter(None, lines))))
        yield grid


def print_missing(providers: Mapping[str, str]) -> None:
    """Print the providers whose kernels are unavailable on this machine, and why."""
    for provider, reason in providers.items():
        print(f"The kernels of {provider!r} cannot be had here: {reason}")
