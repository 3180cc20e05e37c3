"""The random numbers of the sampling ops: against published vectors, Triton's own, and the exact exponential."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from vllm_opset.ops.sampling import philox

# Counter, key and result of Philox4x32-10, from the known answers that Random123 publishes.
ALL_ONES = philox.MASK
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
KEYS = torch.tensor([0, 1, -1, 2**62 + 12_345, -(2**63), 0x123456789])

KINDS = {
    "Python": lambda value: value,
    "PyTorch": lambda value: torch.tensor([value]),
    "NumPy int64": lambda value: np.array([value]),
    "NumPy uint64": lambda value: np.array([value], dtype=np.uint64),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(kind, counter, key, expected):
    words = philox.block(*map(KINDS[kind], counter + key))
    assert tuple(int(word) for word in words) == expected


def test_words_are_the_lanes_of_the_blocks():
    words = philox.words(KEYS, 11)
    for row, key in enumerate(KEYS.tolist()):
        for token in range(11):
            lanes = philox.block(token // 4, 0, 0, 0, key & philox.MASK, key >> 32 & philox.MASK)
            assert words[row, token] == lanes[token % 4]


TRITON = """
import sys, torch, triton, triton.language as tl

@triton.jit
def kernel(keys, out, count: tl.constexpr):
    row = tl.program_id(0)
    counter = tl.arange(0, count)
    a, b, c, d = tl.randint4x(tl.load(keys + row), counter)
    first = out + row * 4 * count + 4 * counter
    tl.store(first, a.to(tl.int64))
    tl.store(first + 1, b.to(tl.int64))
    tl.store(first + 2, c.to(tl.int64))
    tl.store(first + 3, d.to(tl.int64))

keys = torch.load(sys.argv[1])
out = torch.empty((len(keys), 128), dtype=torch.int64)
kernel[(len(keys),)](keys, out, 32)
torch.save(out & 0xFFFFFFFF, sys.argv[2])
"""


def test_words_are_tritons(tmp_path):
    pytest.importorskip("triton", reason="Triton is not published for this machine: runs on Linux")
    program, keys, out = tmp_path / "kernel.py", tmp_path / "keys.pt", tmp_path / "out.pt"
    program.write_text(TRITON)
    torch.save(KEYS, keys)
    # Triton reads this variable when it is imported, so the interpreter has a process of its own.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, program, keys, out], check=True, env=environment, timeout=120)
    assert torch.equal(torch.load(out), philox.words(KEYS, 128))


def test_exponential_is_precise_where_it_is_small():
    words = torch.tensor([0, 1, 2, 1000, 2**20, 2**31])
    exact = -torch.log1p(-((words.double() + 0.5) * 2.0**-32))
    torch.testing.assert_close(philox.exponential(words, torch.float32).double(), exact, rtol=3e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponential_is_positive_and_finite(dtype):
    extremes = philox.exponential(torch.tensor([0, philox.MASK - 1, philox.MASK]), dtype)
    assert (extremes > 0).all()
    assert extremes.isfinite().all()
    assert extremes.max() == pytest.approx(24 * np.log(2), rel=1e-6)


def test_exponential_is_distributed_so():
    """Tests deciles of 100,000 numbers. A correct generator with another key would fail once in a million times."""
    numbers = philox.exponential(philox.words(torch.tensor([42]), 100_000), torch.float32)
    deciles = -torch.log1p(-torch.arange(0.1, 0.95, 0.1))
    counts = torch.bucketize(numbers.flatten(), deciles).bincount(minlength=10).double()
    chi_square = ((counts - 10_000).square() / 10_000).sum()
    assert torch.special.gammaincc(torch.tensor(4.5).double(), chi_square / 2) > 1e-6
