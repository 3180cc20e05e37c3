"""The questions that the tiny model was not trained on, and their grader."""

import json
import runpy

from readme import ROOT

MODEL = ROOT / "examples" / "tiny-qwen3"
HELD_OUT = [json.loads(line) for line in (MODEL / "heldout.jsonl").read_text().splitlines()]
# The share of questions that must be answered exactly.
REQUIRED = 0.99
grade = runpy.run_path(str(MODEL / "tasks.py"))["grade"]


def long_ones(count: int) -> list[dict]:
    """Held-out questions with the longest answers."""
    return sorted(HELD_OUT, key=lambda task: -len(task["answer"]))[:count]
