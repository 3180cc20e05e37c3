"""Files of results: a JSON list of runs, which `bench` and `bench e2e` write and from which pages are generated."""

import json
from collections.abc import Iterable
from pathlib import Path


def read(files: Iterable[Path]) -> list[dict]:
    """The runs of all files, in their order."""
    return [run for file in files for run in json.loads(file.read_text())]


def write(file: Path, runs: Iterable[dict]) -> None:
    """Write the runs, each result on a line of its own, so that a diff names the results that changed."""
    file.write_text("[\n" + ",\n".join(map(_text, runs)) + "\n]\n")


def _text(run: dict) -> str:
    conditions = json.dumps({name: value for name, value in run.items() if name != "results"}, indent=1)
    results = ",\n".join(f"  {json.dumps(result)}" for result in run["results"])
    return conditions.removesuffix("\n}") + f',\n "results": [\n{results}\n ]\n}}'
