"""The documented list of the plugin's changes is exact."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "changes-to-vllm.md"


@pytest.mark.window
def test_the_documented_changes_are_all():
    process = subprocess.run(
        [sys.executable, str(HERE / "changes.py")], capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, process.stderr[-4000:]
    changed = set(json.loads(process.stdout.splitlines()[-1]))
    items = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("- ")]
    documented = {name for line in items for name in re.findall(r"`((?:vllm|torch)\.[\w.]+)`", line.split(": ")[0])}
    if importlib.util.find_spec("vllm.model_executor.hw_agnostic") is None:  # came with 0.28
        documented = {name for name in documented if ".hw_agnostic." not in name}
    assert changed == documented
