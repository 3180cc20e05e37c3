"""The files that both benchmarks read and write: results as JSON, pages of documentation, and pictures."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_opset.bench import runs
from vllm_opset.cli.arguments import given, picture, writable

From = Annotated[
    list[Path] | None,
    typer.Option("--from", metavar="FILE", help="Measure nothing: report the results of this file, from --json."),
]
Json = Annotated[Path | None, typer.Option("--json", callback=writable, help="Write all results here.")]
Markdown = Annotated[
    Path | None, typer.Option("--markdown", callback=writable, help="Write a page of documentation here.")
]
Plot = Annotated[Path | None, typer.Option(callback=picture, help="Draw a picture here (matplotlib).")]
Conditions = Annotated[
    str | None, typer.Option(help="What readers must know of the machine or the run; it is kept with the results.")
]
# The parameters of a command that reports the results of files.
WITH_FROM = ("from_files", "json_file", "markdown_file", "plot")
# A page names its command without these.
OUTPUTS = ("--json", "--markdown", "--plot", "--conditions", "--logs")


@dataclass(frozen=True)
class Outputs:
    """The files to read and to write. sources: the files of --from; [] if results are measured now."""

    sources: Sequence[Path]
    json_file: Path | None
    markdown_file: Path | None
    plot: Path | None

    def read(self, key: str, context: typer.Context) -> list[dict]:
        """The runs in the sources. Refuses a file without runs of this command, which all have `key`.

        It also refuses what says how to measure. context: of the command.
        """
        if asked := [words for name, words in given(context).items() if name not in WITH_FROM]:
            raise typer.BadParameter(f"--from measures nothing: leave out {', '.join(asked)}", param_hint="--from")
        for file in self.sources:
            try:
                found = runs.read([file])
            except (OSError, ValueError) as error:
                raise typer.BadParameter(f"cannot read {file}: {error}", param_hint="--from") from error
            if not found or not all(isinstance(run, dict) and key in run for run in found):
                raise typer.BadParameter(f"{file} holds no results of this command", param_hint="--from")
        return runs.read(self.sources)

    def write(self, reports: list, records: list[dict], page: Callable[..., str], draw: Callable[[list, Path], Any]):
        """Write what was asked for. records: the reports as plain data."""
        if self.json_file:
            runs.write(self.json_file, records)
        if self.markdown_file:
            sources = [self.json_file] if self.json_file else self.sources
            files = (*sources, self.plot)
            *sources, picture = (file and os.path.relpath(file, self.markdown_file.parent) for file in files)
            self.markdown_file.write_text(page(reports, sources, picture))
        if self.plot:
            try:
                draw(reports, self.plot)
            except ValueError as error:
                raise typer.BadParameter(str(error), param_hint="--plot") from error
