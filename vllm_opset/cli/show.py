"""The output of the commands: a rich table for people, JSON for programs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def print_json(value: Any) -> None:
    """Print JSON on standard output, and nothing else there."""
    print(json.dumps(value, indent=2, default=str))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Print one row per mapping, whose keys are the column names."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", expand=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("" if row[column] is None else str(row[column]) for column in columns))
    Console().print(table)


def print_missing(providers: Mapping[str, str]) -> None:
    """Print the providers whose kernels are unavailable on this machine, and why."""
    for provider, reason in providers.items():
        print(f"The kernels of {provider!r} cannot be had here: {reason}")
