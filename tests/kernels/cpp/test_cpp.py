"""The C++ kernels beyond the samples of their contracts: large inputs on several threads, and every attention sample.

tests/test_parity.py checks the contracts of these kernels, like those of all kernels.
"""

import re
import sys

import pytest
import torch
from processes import run

from vllm_opset import kernel, ops, parity
from vllm_opset.ops import _samples
from vllm_opset.ops.attention._paged_inputs import PagedCase
from vllm_opset.ops.contract import Sample
from vllm_opset.ops.moe._experts_inputs import experts_arguments
from vllm_opset.ops.moe.permute import choices

# A user may have no compiler; then torch kernels serve instead. .ci/run requires one, so it skips nothing here.
if reason := kernel.unavailable().get("cpp"):
    pytest.skip(f"no C++ kernels here, until g++ 12 is installed: {reason}", allow_module_level=True)

from vllm_opset.kernels.cpp import paged_attention

TOKENS, HEADS, KV_HEADS, HEAD_SIZE = 700, 8, 2, 64
SLOTS = 1024
NAMES = [op.name for op in ops.ALL if "cpp" in kernel.kernels_of(op.name)]


def normal(*shape: int) -> torch.Tensor:
    return _samples.normal(shape, torch.bfloat16, "cpu", _samples.generator(f"large {shape}"))


def large_inputs(name: str) -> tuple:
    """Inputs that occupy more than one thread, in bf16 except for linear."""
    if name == "linear":
        x, weight, bias = (
            _samples.normal(shape, torch.float32, "cpu", _samples.generator(f"linear {shape}"))
            for shape in ((24, 512), (1030, 512), (1030,))
        )
        return (x, weight * 512**-0.5, bias), {}
    if name == "paged_attention":
        return PagedCase(((1, 300), (3, 70), (1, 1)) * 8).make(name, "cpu", torch.bfloat16)
    if name == "fused_experts":
        ids = choices(name, TOKENS, 8, 2, "cpu")
        return experts_arguments(name, ids, "cpu", torch.bfloat16, 8, 128, 72, shared=True)
    heads = normal(TOKENS, HEADS * HEAD_SIZE), normal(TOKENS, KV_HEADS, HEAD_SIZE), normal(TOKENS, KV_HEADS, HEAD_SIZE)
    query, key, value = heads
    return {
        "rms_norm": lambda: (query, normal(HEADS * HEAD_SIZE), 1e-6),
        "fused_add_rms_norm": lambda: (query, normal(TOKENS, HEADS * HEAD_SIZE) + 1, None, 1e-6),
        "silu_and_mul": lambda: (query,),
        "route": lambda: (normal(TOKENS, 64), 8),
        "rotary_embedding": lambda: (torch.arange(TOKENS), query, key, HEAD_SIZE, normal(TOKENS, HEAD_SIZE).tanh()),
        "reshape_and_cache": lambda: (
            key, value, torch.zeros(SLOTS // 16, KV_HEADS, 16, 2 * HEAD_SIZE, dtype=torch.bfloat16),
            torch.randperm(SLOTS, generator=_samples.generator("slots"))[:TOKENS],
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
        returned = returned if isinstance(returned, tuple) else (returned,)
        tensors = [value for value in (*args, *returned) if isinstance(value, torch.Tensor)]
        return [tensor.clone() for tensor in tensors]

    several = run()
    torch.set_num_threads(1)
    torch.testing.assert_close(several, run(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_large_inputs_agree_with_the_reference(name, two_threads):
    sample = Sample("large", lambda: large_inputs(name))
    check = parity.check_sample(ops.BY_NAME[name], kernel.kernels_of(name)["cpp"], sample, torch.bfloat16)
    assert check.outcome == "passed", check


def test_all_attention_samples_in_cpp(monkeypatch):
    """Long prefills usually go to PyTorch. Here they run in C++ too, to check every feature at every query length."""
    monkeypatch.setattr(paged_attention, "DECODE_TOKENS", 10_000)
    op = ops.paged_attention
    checks = list(parity.check_kernel(op, kernel.kernels_of(op.name)["cpp"], "cpu"))
    assert not [check for check in checks if check.failure]
    assert sum(check.skipped is None for check in checks) > len(checks) / 2


def test_the_library_has_pytorchs_openmp_runtime():
    """A second runtime in the process would have its own threads, which spin while PyTorch's threads work."""
    script = "from vllm_opset.kernels.cpp import _build; _build.library(); print(open('/proc/self/maps').read())"
    maps = run(sys.executable, "-c", script).out
    assert "vllm-opset/kernels-" in maps
    runtimes = set(re.findall(r"/\S*/lib(?:gomp|iomp5|omp)[-.]\S*", maps))
    assert len(runtimes) == 1, runtimes


@pytest.mark.parametrize("lost", [-1, 128])
def test_a_position_beyond_the_table_is_an_error(lost):
    positions, table = torch.tensor([0, lost]), normal(128, HEAD_SIZE)
    query = normal(2, HEADS * HEAD_SIZE)
    before = query.clone()
    with pytest.raises(IndexError, match=f"position {lost} of token 1 is not one of 128"):
        kernel.kernels_of("rotary_embedding")["cpp"].run(positions, query, None, HEAD_SIZE, table)
    assert torch.equal(query, before)


def test_a_cache_in_another_dtype_is_converted_to():
    """Selection knows only the layer's dtype; a model may promote its keys."""
    key, value, cache, slots = large_inputs("reshape_and_cache")[0]
    cpp, expected = cache.clone(), cache.clone()
    kernel.kernels_of("reshape_and_cache")["cpp"].run(key.float(), value.float(), cpp, slots)
    ops.reshape_and_cache(key.float(), value.float(), expected, slots)
    assert torch.equal(cpp, expected)


def test_silu_far_out():
    """Covers inputs for which e^-x is no longer a finite float."""
    x = torch.tensor([[-1e38, -1e5, -89.0, 89.0, 1e38, -torch.inf, torch.inf, torch.nan]])
    got = kernel.kernels_of("silu_and_mul")["cpp"].run(torch.cat((x, torch.ones_like(x)), dim=1))
    torch.testing.assert_close(got, torch.nn.functional.silu(x), equal_nan=True)


def test_the_first_slot_beyond_the_cache_is_refused_before_anything_is_written():
    key, value, cache = torch.ones(2, 2, 16), torch.ones(2, 2, 16), torch.zeros(4, 2, 16, 32)
    with pytest.raises(IndexError):
        kernel.kernels_of("reshape_and_cache")["cpp"].run(key, value, cache, torch.tensor([3, 4 * 16]))
    assert not cache.any()


@pytest.mark.parametrize("num_tokens", [1, 3, 8, 9, 16, 17, 32, 33])
def test_linear_agrees_with_the_reference_for_each_number_of_tokens(num_tokens):
    """The kernel multiplies few, some and many tokens in different ways."""
    x, weight, bias = large_inputs("linear")[0]
    sample = Sample("tokens", lambda: ((x.repeat(2, 1)[:num_tokens], weight, bias), {}))
    check = parity.check_sample(ops.linear, kernel.kernels_of("linear")["cpp"], sample, torch.float32)
    assert check.outcome == "passed", check


@pytest.mark.parametrize("lost", [-2, 8])
def test_an_expert_that_does_not_exist_is_an_error(lost):
    (hidden_states, w1, w2, weights, ids), how = large_inputs("fused_experts")
    ids[3, 1] = lost
    with pytest.raises(IndexError, match=f"expert {lost} of choice 7 is not one of 8"):
        kernel.kernels_of("fused_experts")["cpp"].run(hidden_states, w1, w2, weights, ids, **how)
