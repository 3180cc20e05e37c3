"""benchmarks/two_checkouts.py: the kernels of this checkout beside themselves."""

import json
import sys

from processes import run
from readme import ROOT

SCRIPT = ROOT / "benchmarks" / "two_checkouts.py"


def test_both_checkouts_are_timed(tmp_path):
    kept = tmp_path / "times.json"
    words = ("--device", "cpu", "--rounds", 1, "--differing", 0, "--json", kept)
    finished = run(sys.executable, SCRIPT, ROOT, "--case", "silu_and_mul cp? T1 *", *words, COLUMNS=100)
    assert finished.code == 0, finished.output
    for op, kernel, case, before, after, again in json.loads(kept.read_text()):
        assert op == "silu_and_mul" and kernel in ("cpu", "cpp") and case == "T1 I12288"
        assert all(0 < seconds < 1 for seconds in (before, after, again)) and f"{1e6 * before:.2f}" in finished.out
    assert "Geometric mean of " in finished.out and "Before again: from " in finished.out


def test_a_pattern_without_cases_is_an_error():
    finished = run(sys.executable, SCRIPT, ROOT, "--device", "cpu", "--case", "nothing")
    assert finished.code == 2 and "no case that matches 'nothing'" in finished.output
