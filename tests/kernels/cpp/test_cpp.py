"""The C++ kernels beyond the samples of their contracts: large inputs on several threads, and every attention sample.

tests/test_parity.py checks the contracts of these kernels, like those of all kernels.
"""

import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from processes import run

from vllm_opset import kernel, ops, parity
from vllm_opset.ops import _samples
from vllm_opset.ops.attention._paged_inputs import UNTOUCHED, PagedCase
from vllm_opset.ops.contract import Sample
from vllm_opset.ops.moe._experts_inputs import experts_arguments
from vllm_opset.ops.moe.permute import choices
from vllm_opset.ops.rope._fused_rope import RopeCase

# A user may have no compiler; then torch kernels serve instead. .ci/run requires one, so it skips nothing here.
if reason := kernel.unavailable().get("cpp"):
    pytest.skip(f"no C++ kernels here, until g++ 12 is installed: {reason}", allow_module_level=True)

from vllm_opset.kernels.cpp import paged_attention

TOKENS, HEADS, KV_HEADS, HEAD_SIZE = 700, 8, 2, 64
SLOTS = 1024
NAMES = [op.name for op in ops.ALL if "cpp" in kernel.kernels_of(op.name)]


def normal(*shape: int) -> torch.Tensor:
    return _samples.normal(shape, torch.bfloat16, "cpu", _samples.generator(f"large {shape}"))


def linear_inputs(dtype: torch.dtype) -> tuple:
    x, weight, bias = (
        _samples.normal(shape, dtype, "cpu", _samples.generator(f"linear {shape}"))
        for shape in ((24, 250), (1040, 250), (1040,))
    )
    return (x, weight * 250**-0.5, bias), {}


def large_inputs(name: str) -> tuple:
    """Inputs that occupy more than one thread, in bf16."""
    if name == "linear":
        return linear_inputs(torch.bfloat16)
    if name in ("rope_cache", "qk_norm_rope_cache"):
        case = RopeCase(slots=tuple(range(100, 100 + TOKENS)), heads=HEADS, num_blocks=SLOTS // 16)
        rng = _samples.generator(name)
        tokens = case.query_key_value(rng, "cpu", torch.bfloat16)
        rest, _ = case.rest(rng, "cpu", torch.bfloat16)
        weights = (normal(HEAD_SIZE), normal(HEAD_SIZE) + 1, 1e-6) if name == "qk_norm_rope_cache" else ()
        return (*tokens, *weights, *rest), {}
    if name == "paged_attention":
        return PagedCase(((1, 300), (3, 70), (20, 40), (1, 1)) * 8).make(name, "cpu", torch.bfloat16)
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
        returned = kernel.kernels_of(name)["cpp"].call(*args, **options)
        returned = returned if isinstance(returned, tuple) else (returned,)
        tensors = [value for value in (*args, *returned) if isinstance(value, torch.Tensor)]
        return [tensor.nan_to_num() for tensor in tensors]

    several = run()
    torch.set_num_threads(1)
    torch.testing.assert_close(several, run(), rtol=0, atol=0, equal_nan=True)


def test_two_python_threads_may_call_at_once(two_threads):
    """Only one of them has the team of threads; the other computes alone."""
    x = normal(TOKENS, 4096)
    expected = kernel.kernels_of("silu_and_mul")["cpp"].call(x)

    def call(_) -> bool:
        torch.set_num_threads(2)
        results = [kernel.kernels_of("silu_and_mul")["cpp"].call(x) for _ in range(50)]
        return all(torch.equal(result, expected) for result in results)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(call, range(2)))


# A user without privileges may have no more threads than this process has.
FEW_THREADS = """
import os, resource, sys, torch
from vllm_opset import kernel
silu_and_mul, x = kernel.kernels_of("silu_and_mul")["cpp"], torch.ones(600, 600)
expected = silu_and_mul.run(x)
torch.set_num_threads(3)
if os.geteuid() == 0:
    try:
        os.setuid(12345)
    except OSError:
        sys.exit("root may not become another user")
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
result = silu_and_mul.run(x)
torch.set_num_threads(1)
print(torch.equal(result, expected))
"""


def test_fewer_threads_compute_where_the_system_allows_no_more():
    process = run(sys.executable, "-c", FEW_THREADS, OMP_NUM_THREADS=1)
    if "root may not become another user" in process.err:
        pytest.skip("root may not become another user: runs where it may")
    assert process.out.strip() == "True", process


@pytest.mark.parametrize("name", NAMES)
def test_large_inputs_agree_with_the_reference(name, two_threads):
    sample = Sample("large", lambda: large_inputs(name))
    check = parity.check_sample(ops.BY_NAME[name], kernel.kernels_of(name)["cpp"], sample, torch.bfloat16)
    assert check.outcome == "passed", check


@pytest.mark.parametrize("tokens", [1, 4, 10_000])
def test_all_attention_samples_wherever_requests_are_divided(tokens, monkeypatch):
    """With 10,000 tokens, long prefills run in C++ too, which checks every feature at every query length."""
    monkeypatch.setattr(paged_attention, "DECODE_TOKENS", tokens)
    op = ops.paged_attention
    checks = list(parity.check_kernel(op, kernel.kernels_of(op.name)["cpp"], "cpu"))
    assert not [check for check in checks if check.failure]
    assert sum(check.skipped is None for check in checks) > len(checks) / 2


def test_each_request_of_a_mixed_batch_is_attended_by_one_kernel(monkeypatch):
    """The other kernel is taken away, so that its rows stay as they were."""
    asked = []
    monkeypatch.setattr(
        paged_attention.in_torch, "paged_attention", lambda *args, least_tokens, **options: asked.append(least_tokens)
    )
    args, options = PagedCase(((1, 30), (7, 40), (0, 0), (6, 9), (19, 19))).make("divided", "cpu", torch.float32)
    kernel.kernels_of("paged_attention")["cpp"].run(*args, **options)
    written = (args[3] != UNTOUCHED).all(dim=2).all(dim=1)
    assert written.nonzero().flatten().tolist() == [0, *range(8, 14)] and asked == [7]


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


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [(torch.float32, 1030), (torch.bfloat16, 16), (torch.bfloat16, 80), (torch.bfloat16, 1040)],
)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 32, 33])
def test_linear_agrees_with_the_reference_for_each_number_of_tokens(dtype, num_tokens, rows):
    """The kernel multiplies few, some and many tokens in different ways, and the last rows of a weight on their own."""
    x, weight, bias = linear_inputs(dtype)[0]
    sample = Sample("tokens", lambda: ((x.repeat(2, 1)[:num_tokens], weight[:rows], bias[:rows]), {}))
    check = parity.check_sample(ops.linear, kernel.kernels_of("linear")["cpp"], sample, dtype)
    assert check.outcome == "passed", check


@pytest.mark.parametrize("lost", [-2, 8])
def test_an_expert_that_does_not_exist_is_an_error(lost):
    (hidden_states, w1, w2, weights, ids), how = large_inputs("fused_experts")
    ids[3, 1] = lost
    with pytest.raises(IndexError, match=f"choice 7 is expert {lost}, which does not exist"):
        kernel.kernels_of("fused_experts")["cpp"].run(hidden_states, w1, w2, weights, ids, **how)


def test_a_map_to_an_expert_that_is_not_here_is_an_error():
    (hidden_states, w1, w2, weights, ids), how = large_inputs("fused_experts")
    expert_map = torch.arange(8, dtype=torch.int32)
    expert_map[ids[0, 0]] = 8
    with pytest.raises(IndexError, match=f"choice 0 is expert {ids[0, 0]}, which does not exist"):
        kernel.kernels_of("fused_experts")["cpp"].run(hidden_states, w1, w2, weights, ids, expert_map=expert_map, **how)


@pytest.mark.parametrize("name", ["rope_cache", "qk_norm_rope_cache"])
@pytest.mark.parametrize(
    ("row", "wrong", "message"),
    [(-5, 128, "position 128 of token 9"), (-5, -1, "position -1 of token 9"), (-1, SLOTS, "slot 1024 of token 9")],
)
def test_a_row_that_does_not_exist_is_refused_before_anything_is_written(name, row, wrong, message):
    args, _ = large_inputs(name)
    args[row][9] = wrong
    before = args[0].clone()
    with pytest.raises(IndexError, match=message):
        kernel.kernels_of(name)["cpp"].run(*args)
    assert torch.equal(args[0], before) and args[-2].isnan().all()


@pytest.mark.parametrize("name", ["rope_cache", "qk_norm_rope_cache"])
@pytest.mark.parametrize("strided", ["query", "key", "value", "table"])
def test_tensors_with_other_strides_are_rotated_as_well(name, strided):
    """The library reads dense heads and a contiguous table."""
    place = {"query": 0, "key": 1, "value": 2, "table": -4}[strided]
    results = []
    for layout in (lambda x: x, lambda x: x.mT.contiguous().mT):
        args = [*large_inputs(name)[0]]
        args[place] = layout(args[place])
        kernel.kernels_of(name)["cpp"].run(*args)
        results.append((args[0], args[-2].nan_to_num()))
    for dense, other in zip(*results, strict=True):
        torch.testing.assert_close(other, dense, rtol=2**-7, atol=2**-7)
