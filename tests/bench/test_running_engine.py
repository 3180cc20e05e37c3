"""An engine of a comparison in its own processes, for scripts in place of vLLM."""

import json
import subprocess

import psutil

from vllm_opset.bench import engines
from vllm_opset.bench.cases import Request

STARTED = {"versions": {}, "platform": "none", "device": None, "compiled": []}
SECONDS = 0.3  # of CPU time in a process that ends before the answer

# An engine whose answer takes a process that computes for SECONDS and ends.
ANSWERING = f"""
import subprocess, sys
print({json.dumps(json.dumps(STARTED))}, flush=True)
for line in sys.stdin:
    busy = "import time\\nwhile time.process_time() < {SECONDS}: pass"
    subprocess.run([sys.executable, "-c", busy], check=True)
    print('{{"seconds": 1, "tokens": [[0]], "steps": 1, "compiled": [], "peak_bytes": 0}}', flush=True)
"""


def test_cpu_time_counts_processes_that_end_meanwhile(tmp_path, monkeypatch):
    child = tmp_path / "child.py"
    child.write_text(ANSWERING)
    monkeypatch.setattr(engines, "CHILD", child)
    started = subprocess.Popen(["true"])
    ended, children = psutil.Process(started.pid), psutil.Process.children
    started.wait()
    # A compiler, for example, that ends after it was listed.
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [*children(self, recursive), ended])
    with engines.RunningEngine(engines.Engine("answering"), {}, tmp_path) as engine, engine.awake():
        answer = engine.ask([Request([1], 1)])
    assert answer.cpu_seconds > SECONDS / 2
