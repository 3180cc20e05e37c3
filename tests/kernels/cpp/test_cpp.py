"""The C++ kernels beyond the samples of their contracts: large inputs on several threads, and every attention sample.

The contracts themselves are checked by tests/test_parity.py, as of all kernels.
"""

import re
from pathlib import Path

import pytest
import torch

from vllm_opset import kernel, ops, parity
from vllm_opset.ops import samples
from vllm_opset.ops.contract import Sample
from vllm_opset.ops.paged_inputs import PagedCase

if reason := kernel.unavailable().get("cpp"):
    pytest.skip(f"C++ kernels need a compiler: {reason}", allow_module_level=True)

from vllm_opset.kernels.cpp import _build, paged_attention

TOKENS, HEADS, KV_HEADS, HEAD_SIZE = 700, 8, 2, 64
SLOTS = 1024
NAMES = [op.name for op in ops.ALL if "cpp" in kernel.kernels_of(op.name)]


def normal(*shape: int) -> torch.Tensor:
    return samples.normal(shape, torch.bfloat16, "cpu", samples.generator(f"large {shape}"))


def large_inputs(name: str) -> tuple:
    """More than one thread's worth, in bf16."""
    if name == "paged_attention":
        return PagedCase(((1, 300), (3, 70), (1, 1)) * 8).make(name, "cpu", torch.bfloat16)
    heads = normal(TOKENS, HEADS * HEAD_SIZE), normal(TOKENS, KV_HEADS, HEAD_SIZE), normal(TOKENS, KV_HEADS, HEAD_SIZE)
    query, key, value = heads
    return {
        "rms_norm": lambda: (query, normal(HEADS * HEAD_SIZE), 1e-6),
        "fused_add_rms_norm": lambda: (query, normal(TOKENS, HEADS * HEAD_SIZE) + 1, None, 1e-6),
        "silu_and_mul": lambda: (query,),
        "rotary_embedding": lambda: (torch.arange(TOKENS), query, key, HEAD_SIZE, normal(TOKENS, HEAD_SIZE).tanh()),
        "reshape_and_cache": lambda: (
            key, value, torch.zeros(SLOTS // 16, KV_HEADS, 16, 2 * HEAD_SIZE, dtype=torch.bfloat16),
            torch.randperm(SLOTS, generator=samples.generator("slots"))[:TOKENS],
        ),
    }[name](), {}  # fmt: skip


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", NAMES)
def test_several_threads_give_the_same_bits(name, two_threads):
    def run():
        args, options = large_inputs(name)
        returned = kernel.kernels_of(name)["cpp"].run(*args, **options)
        tensors = [value for value in (*args, returned) if isinstance(value, torch.Tensor)]
        return [tensor.clone() for tensor in tensors]

    several = run()
    torch.set_num_threads(1)
    torch.testing.assert_close(several, run(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_large_inputs_agree_with_the_reference(name, two_threads):
    sample = Sample("large", lambda: large_inputs(name))
    check = parity.check_sample(ops.BY_NAME[name], kernel.kernels_of(name)["cpp"], sample, torch.bfloat16)
    assert check.passed and check.skipped is None, check


def test_all_attention_samples_in_cpp(monkeypatch):
    """With long prefills too, which are PyTorch's as a rule: so every feature is checked at every query length."""
    monkeypatch.setattr(paged_attention, "FEW_TOKENS", 10_000)
    op = ops.paged_attention
    checks = list(parity.check_kernel(op, kernel.kernels_of(op.name)["cpp"], "cpu"))
    assert not [check for check in checks if not check.passed]
    assert sum(check.skipped is None for check in checks) > len(checks) / 2


def test_one_openmp_runtime_in_the_process():
    """A second one would have threads of its own, which spin while PyTorch's work."""
    mapped = Path("/proc/self/maps").read_text()
    assert str(_build.library().path) in mapped
    runtimes = set(re.findall(r"/\S*/lib(?:gomp|iomp5|omp)[-.]\S*", mapped))
    assert len(runtimes) == 1, runtimes
