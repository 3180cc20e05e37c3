"""Files of results: a JSON list of runs, which `bench` and `bench e2e` write and from which pages are generated."""

import json
from collections.abc import Iterable
from pathlib import Path


def read(files: Iterable[Path]) -> list[dict]:
    """The runs of all files, in their order. Raises OSError, and ValueError for a file that is no list in JSON."""
    return [run for file in files for run in _runs(file)]


def _runs(file: Path) -> list[dict]:
    runs = json.loads(file.read_text())
    if not isinstance(runs, list):
        raise ValueError("it has no list of runs")
    return runs


def write(file: Path, runs: Iterable[dict]) -> None:
    """Write the runs, each result on a line of its own, so that a diff names the results that changed."""
    file.write_text("[\n" + ",\n".join(map(_text, runs)) + "\n]\n")


def _text(run: dict) -> str:
    conditions = json.dumps({name: value for name, value in run.items() if name != "results"}, indent=1)
    results = ",\n".join(f"  {json.dumps(result)}" for result in run["results"])
    return conditions.removesuffix("\n}") + f',\n "results": [\n{results}\n ]\n}}'
