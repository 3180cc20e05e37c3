"""`linear` of one row reads nothing behind the weight, also if its last program has fewer outputs than the others."""

import os
import subprocess
import sys

import pytest
import torch

# The weight ends where a page begins that no one may read, so a read behind it ends the process. It runs on a CPU, in
# Triton's interpreter, which reads the addresses that a GPU would read.
SCRIPT = """
import ctypes, mmap
import torch
from vllm_opset.kernel import kernels_of
libc = ctypes.CDLL(None)
for columns in (512, 1000, 1500):  # a program has 8, 4 and 2 outputs
    size = 5 * columns * 4
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(address + pages), mmap.PAGESIZE, 0) == 0
    weight = torch.frombuffer(memory, dtype=torch.float32, count=5 * columns, offset=pages - size)
    weight = weight.view(5, columns).normal_()
    x = torch.randn(1, columns)
    torch.testing.assert_close(kernels_of("linear")["triton"].run(x, weight), x @ weight.T, rtol=1e-4, atol=1e-3)
    print(columns)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter: runs where there is no GPU")
def test_linear_reads_nothing_behind_the_weight():
    pytest.importorskip("triton", reason="runs Triton's kernels: runs where there is Triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert finished.returncode == 0 and finished.stdout.split() == ["512", "1000", "1500"], finished.stderr
