"""Kernels that are compiled ahead: several at once, not launched, and ready when they are."""

import json
import os
import subprocess
import sys
from pathlib import Path

# For a Hopper GPU, without one; Triton decides at import whether it interprets.
SCRIPT = """
import json
import compile_only, torch, triton
from triton.runtime import driver
from vllm_opset import ops
from vllm_opset.kernel import kernels_of
from vllm_opset.kernels.triton._ahead import compiled_ahead

launched, compiled = [], compile_only._recorded()

class Counting(compile_only.CompileOnly):
    def launcher_cls(self, source, metadata):
        return lambda *_: launched.append(metadata.name)

triton.runtime.driver.set_active(Counting())
calls = [
    (kernels_of(name)["triton"], sample.make())
    for name in ("rms_norm", "rope_cache") for sample in list(ops.BY_NAME[name].samples("cpu", torch.bfloat16))[:2]
]

def call_all():
    for kernel, (args, kwargs) in calls:
        kernel.run(*args, **kwargs)
    return len(launched), len(compiled)

with compiled_ahead():
    call_all()
print(json.dumps([(len(launched), len(compiled)), call_all()]))
"""


def test_kernels_are_compiled_and_not_launched(tmp_path):
    paths = [str(Path(__file__).parent), *sys.path]
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ
        | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    (launched, compiled), (launched_then, compiled_then) = json.loads(process.stdout)
    assert launched == 0 and compiled >= 2
    assert launched_then == 4 and compiled_then == compiled
