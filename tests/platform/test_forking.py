"""A process that has used threads can be forked."""

import subprocess
import sys

import pytest

from vllm_opset.kernel import why_unavailable

FORK = """
import os, signal, torch
from vllm_opset.platform import forking
{safe}
{use}
torch.set_num_threads(2)
use()
child = os.fork()
if child == 0:
    signal.alarm({patience})
    torch.set_num_threads(2)
    use()
    os._exit(0)
_, status = os.waitpid(child, 0)
use()
print("hangs" if os.WIFSIGNALED(status) else "runs")
"""


# Code that uses two threads: PyTorch's, and those of the C++ kernels, which start anew in a forked process.
IN_TORCH = "def use(): return (torch.randn(600, 600) @ torch.randn(600, 600)).exp().sum()"
IN_CPP = "from vllm_opset import kernel\ndef use(): kernel.kernels_of('silu_and_mul')['cpp'].run(torch.ones(600, 600))"


def forked(safe: str, patience: int, use: str = IN_TORCH) -> str:
    script = FORK.format(safe=safe, patience=patience, use=use)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120).stdout.strip()


@pytest.mark.parametrize("use", [IN_TORCH, IN_CPP], ids=["torch", "cpp"])
def test_forked_process_computes(use):
    if use == IN_CPP and (reason := why_unavailable("cpp")):
        pytest.skip(f"no C++ kernels here, until g++ 12 is installed (.ci/run requires it): {reason}")
    assert forked("forking.make_safe()", 60, use) == "runs"


def test_forked_process_would_hang_otherwise():
    """If this fails, PyTorch's threads survive a fork by themselves, and `forking` can be removed."""
    assert forked("", patience=5) == "hangs"
