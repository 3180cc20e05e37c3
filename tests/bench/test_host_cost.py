"""benchmarks/host_cost.py and attention_host.py: an engine, or a layer, whose kernel launches do nothing."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from processes import run
from readme import ROOT

SCRIPT, LAYER = (ROOT / "benchmarks" / f"{name}.py" for name in ("host_cost", "attention_host"))
FOLDERS = (ROOT, ROOT / "tests" / "kernels" / "triton", ROOT / "tests" / "engine")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed: runs where it is"),
]


def rows_of(script: Path, *words: object, **variables: object) -> list[list[str]]:
    """The rows of the table that a script prints."""
    finished = run(sys.executable, script, *words, PYTHONPATH=os.pathsep.join(map(str, FOLDERS)), **variables)
    assert finished.code == 0, finished.output
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in finished.out.splitlines() if "│" in line]


def test_every_kernel_of_a_layer_is_timed():
    rows = rows_of(SCRIPT, 128, 2, COLUMNS=100)
    calls = {op: number for op, number, *_ in rows}
    assert calls["all"] == "" and calls["paged_attention"] == calls["qk_norm_rope_cache"] == "36"
    assert calls["fused_add_rms_norm"] == "72" and calls["linear"] == "145"
    assert all(0 < float(each) < 1e4 for _, number, each, *_ in rows if number)


def test_products_in_fp8_are_timed():
    rows = rows_of(SCRIPT, 128, 2, "--quantization", "fp8", COLUMNS=100)
    calls = {op: number for op, number, *_ in rows}
    assert (calls["linear"], calls["quantise"]) == ("145", "144")


def test_a_layer_of_attention_is_timed():
    (times,) = rows_of(LAYER, 1, "decode, 1", OPSET_PLATFORM="cpu")
    assert len(times) == 7 and all(float(time) > 0 for time in times[1:])
