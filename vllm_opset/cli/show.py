"""The output of the commands: a rich table for people, JSON for programs."""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
# More than any table's width, in characters.
UNLIMITED = 100_000


def print_json(value: Any) -> None:
    """Print JSON on standard output, and nothing else there."""
    print(json.dumps(value, indent=2, default=str))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Print one row per mapping, whose keys are the column names. Brackets in a cell are text, not rich's markup.

    A table fits a terminal, or the variable COLUMNS. In a file or a pipe each row is one line, so that grep finds it.
    """
    table = Table(title=Text(title), title_justify="left", title_style="bold", header_style="bold", expand=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "op")  # overrides take an op's whole name
    for row in rows:
        table.add_row(*(Text("" if row[column] is None else str(row[column])) for column in columns))
    fits = sys.stdout.isatty() or "COLUMNS" in os.environ
    Console(width=None if fits else UNLIMITED).print(table)


def print_missing(providers: Mapping[str, str]) -> None:
    """Print the providers whose kernels are unavailable on this machine, and why."""
    for provider, reason in providers.items():
        print(f"The kernels of {provider!r} cannot be had here: {reason}")
