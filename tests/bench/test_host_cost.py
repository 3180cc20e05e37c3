"""benchmarks/host_cost.py: an engine whose kernel launches do nothing."""

import importlib.util
import os
import sys

import pytest
from processes import run
from readme import ROOT

SCRIPT = ROOT / "benchmarks" / "host_cost.py"
FOLDERS = (ROOT, ROOT / "tests" / "kernels" / "triton", ROOT / "tests" / "engine")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed: runs where it is"),
]


def test_every_kernel_of_a_layer_is_timed():
    finished = run(sys.executable, SCRIPT, 128, 2, PYTHONPATH=os.pathsep.join(map(str, FOLDERS)), COLUMNS=100)
    assert finished.code == 0, finished.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in finished.out.splitlines() if "│" in line]
    calls = {op: number for op, number, *_ in rows}
    assert calls["all"] == "" and calls["paged_attention"] == calls["qk_norm_rope_cache"] == "36"
    assert calls["fused_add_rms_norm"] == "72" and calls["linear"] == "145"
    assert all(0 < float(each) < 1e4 for _, number, each, *_ in rows if number)
