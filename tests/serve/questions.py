"""The questions that the tiny model was not trained on, and their grader."""

import json
import runpy
from pathlib import Path

from readme import ROOT

FOLDER: Path = ROOT / "examples" / "tiny-qwen3"
HELD_OUT = [json.loads(line) for line in (FOLDER / "heldout.jsonl").read_text().splitlines()]
grade = runpy.run_path(str(FOLDER / "tasks.py"))["grade"]


def long_ones(count: int) -> list[dict]:
    """Held-out questions with the longest answers."""
    return sorted(HELD_OUT, key=lambda task: -len(task["answer"]))[:count]
