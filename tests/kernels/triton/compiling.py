"""Runs scripts that compile kernels for a Hopper GPU, without one. Triton decides at import whether it interprets."""

import json
import os
import subprocess
import sys
from pathlib import Path


def printed(script: str, folder: Path) -> list:
    """The list that a script prints as JSON. It runs in a process of its own, with an empty cache in this folder."""
    (folder / "script.py").write_text(script)
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    process = subprocess.run(
        [sys.executable, folder / "script.py"],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder), "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)
