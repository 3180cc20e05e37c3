"""A process that has used threads can be forked; threads are the user's word, or the cores."""

import os
import subprocess
import sys

import pytest

from vllm_opset.kernel import why_unavailable
from vllm_opset.platform.cpu import threads

FORK = """
import os, signal, torch
from vllm_opset.platform.cpu import threads
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


# What uses two threads: PyTorch, and the C++ kernels, which share its runtime.
IN_TORCH = "def use(): return (torch.randn(600, 600) @ torch.randn(600, 600)).exp().sum()"
IN_CPP = "from vllm_opset import kernel\ndef use(): kernel.kernels_of('silu_and_mul')['cpp'].run(torch.ones(600, 600))"


def forked(safe: str, patience: int, use: str = IN_TORCH) -> str:
    script = FORK.format(safe=safe, patience=patience, use=use)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120).stdout.strip()


@pytest.mark.parametrize("use", [IN_TORCH, IN_CPP], ids=["torch", "cpp"])
def test_forked_process_computes(use):
    if use == IN_CPP and (reason := why_unavailable("cpp")):
        pytest.skip(f"no C++ kernels here, until g++ 12 is installed (.ci/run requires it): {reason}")
    assert forked("threads.make_forking_safe()", 60, use) == "runs"


def test_forked_process_would_hang_otherwise():
    """If this fails, PyTorch's threads survive a fork by themselves, and `make_forking_safe` can go."""
    assert forked("", patience=5) == "hangs"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "4 2 1"),
        ({"OMP_NUM_THREADS": "1"}, "1 1 1"),
        ({"OMP_NUM_THREADS": ""}, "4 2 1"),
        ({"OMP_NUM_THREADS": "2,4"}, "2 2 2"),
        ({"OMP_NUM_THREADS": "2", "OPSET_NUM_THREADS": "1"}, "1 1 1"),
        ({"OMP_NUM_THREADS": "1", "OPSET_NUM_THREADS": "auto"}, "4 2 1"),
    ],
)
def test_threads_of_a_worker(environment, expected):
    """Of one, of two and of eight workers on five cores, one of which is for the rest, where vLLM says 3."""
    script = (
        "import os; from vllm_opset.platform.cpu import machine, threads; machine.physical_cores = lambda: 5\n"
        "threads.remember_users_choice(); os.environ['OMP_NUM_THREADS'] = '3'; threads.remember_users_choice()\n"
        "print(*(threads.set_compute_threads(workers) for workers in (1, 2, 8)))"
    )
    process = run(script, environment)
    assert process.stdout.strip() == expected, process.stderr


def test_a_number_of_threads_that_is_none_is_an_error():
    process = run(
        "from vllm_opset.platform.cpu import threads; threads.set_compute_threads(1)", {threads.VARIABLE: "all"}
    )
    assert "OPSET_NUM_THREADS='all' is neither a number nor 'auto'" in process.stderr


def run(script: str, environment: dict[str, str]) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    return subprocess.run(
        [sys.executable, "-c", script], env=clean | environment, capture_output=True, text=True, timeout=120
    )
