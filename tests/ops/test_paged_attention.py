"""paged_attention against other implementations, on dense keys and values with explicit masks."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_opset import ops
from vllm_opset.kernel import kernels_of
from vllm_opset.kernels.cpu import _paged_plan
from vllm_opset.ops import _samples
from vllm_opset.ops.attention._paged_inputs import LAYOUTS, NAN, UNTOUCHED, PagedCase
from vllm_opset.ops.attention.paged_batch import PACKED_BLOCK_SIZE, PagedBatch, packed_batch, packed_cache

MIXED = PagedCase(((1, 77), (1, 3), (19, 19), (6, 50), (0, 0), (4, 34)), padded_rows=3)
NON_CAUSAL = PagedCase(((9, 9), (33, 33), (1, 20), (5, 3)), causal=False)
CASES = {
    "mixed": (MIXED, {}),
    "MHA": (MIXED, {"num_kv_heads": 4}),
    "MQA": (MIXED, {"num_kv_heads": 1}),
    "window": (MIXED, {"window": 20}),
    "window of 1": (MIXED, {"window": 1}),
    "window as a pair": (MIXED, {"window": (7, 0)}),
    "window to the right of a causal query": (MIXED, {"window": (7, 5)}),
    "ALiBi": (MIXED, {"alibi": True}),
    "ALiBi, window": (MIXED, {"alibi": True, "window": 20}),
    "soft cap": (MIXED, {"soft_cap": 1.5, "query_std": 2.0}),
    "soft cap, window, MHA": (MIXED, {"soft_cap": 1.5, "window": 20, "num_kv_heads": 4}),
    "soft cap, ALiBi": (MIXED, {"soft_cap": 1.5, "alibi": True}),
    "sinks": (MIXED, {"sinks": True}),
    "sinks, window": (MIXED, {"sinks": True, "window": 20}),
    "non-causal": (NON_CAUSAL, {}),
    "non-causal, ALiBi": (NON_CAUSAL, {"alibi": True}),
    "non-causal, soft cap": (NON_CAUSAL, {"soft_cap": 1.5}),
    "non-causal, window": (PagedCase(((9, 9), (33, 33), (2, 20)), causal=False), {"window": (5, 3)}),
    "non-causal, window to the left": (PagedCase(((9, 9), (33, 33)), causal=False), {"window": (5, -1)}),
    "non-causal, window to the right": (PagedCase(((9, 9), (33, 33)), causal=False), {"window": (-1, 5)}),
}
# The dtype in which a kernel runs, and its largest difference from fp64.
RUNS = {"reference": (torch.float64, 1e-9), "cpu": (torch.float32, 2e-5)}


@pytest.fixture(params=RUNS)
def name(request) -> str:
    return request.param


@pytest.fixture
def short_chunks(monkeypatch):
    """Makes the CPU kernel's chunks so short that small batches take many chunks, some of one head."""
    cut_short(monkeypatch, chunk_bytes=50_000)


def cut_short(patch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    patch.setattr(_paged_plan, "QUERY_BLOCK", 8)
    patch.setattr(_paged_plan, "CHUNK_BYTES", chunk_bytes)
    patch.setattr("vllm_opset.kernels.cpu.paged_attention.SCORES_BYTES", 3_000)


def sees(case: PagedCase, query_position: int, key_position: int) -> bool:
    left, right = (case.window - 1, 0) if isinstance(case.window, int) else case.window or (-1, -1)
    return (
        not (case.causal and key_position > query_position)
        and not (left >= 0 and key_position < query_position - left)
        and not (right >= 0 and key_position > query_position + right)
    )


def dense(case: PagedCase, seed: str) -> torch.Tensor:
    """The expected result of `case`, in fp64: by PyTorch's attention, or by transformers' for Gemma 2 and gpt-oss."""
    tokens = case.tokens(_samples.generator(seed), "cpu", torch.float64)
    (query, *_), options = case.make(seed, "cpu", torch.float64)
    group = case.num_heads // case.num_kv_heads
    results, start = [], 0
    for (query_len, seq_len), request in zip(case.requests, tokens, strict=True):
        first = seq_len - query_len
        rows = [[0.0 if sees(case, first + i, j) else -math.inf for j in range(seq_len)] for i in range(query_len)]
        mask = torch.tensor(rows, dtype=torch.float64).view(1, query_len, seq_len)
        if case.alibi:
            ahead = torch.arange(seq_len) - torch.arange(first, seq_len)[:, None]
            mask = mask + options["alibi_slopes"].double()[:, None, None] * ahead
        q = query[start : start + query_len].transpose(0, 1)[None]
        k, v = (half.transpose(0, 1)[None] for half in request.chunk(2, dim=-1))
        module = SimpleNamespace(num_key_value_groups=group, training=False, sinks=options.get("sinks"))
        if case.soft_cap:
            from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

            result, _ = eager_attention_forward(
                module, q, k, v, mask[None], scaling=options["scale"], softcap=case.soft_cap
            )
        elif case.sinks:
            from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

            result, _ = eager_attention_forward(module, q, k, v, mask[None], scaling=options["scale"])
        else:
            k, v = (half.repeat_interleave(group, dim=1) for half in (k, v))
            result = F.scaled_dot_product_attention(q, k, v, mask[None], scale=options["scale"]).transpose(1, 2)
        results.append(result[0])
        start += query_len
    return torch.cat(results)


def attended(name: str, case: PagedCase, seed: str) -> torch.Tensor:
    """The rows of the batch that a kernel wrote, after a check of the other rows."""
    inputs, options = case.make(seed, "cpu", RUNS[name][0])
    kernels_of("paged_attention")[name].run(*inputs, **options)
    out = inputs[3]
    assert (out[case.num_tokens :] == UNTOUCHED).all(), "wrote rows after the last query token"
    return out[: case.num_tokens].double()


def assert_equals_dense(name: str, case: PagedCase, seed: str) -> None:
    # transformers computes the softmax in fp32 for any input dtype.
    slack = max(RUNS[name][1], 1e-6 if case.soft_cap else 0)
    torch.testing.assert_close(attended(name, case, seed), dense(case, seed), rtol=slack, atol=slack)


@pytest.mark.parametrize("case", CASES)
def test_equals_dense_attention(name, case):
    base, changes = CASES[case]
    assert_equals_dense(name, replaced(base, **changes), case)


@pytest.mark.parametrize("case", CASES)
def test_equals_dense_attention_however_it_is_cut(case, short_chunks):
    base, changes = CASES[case]
    assert_equals_dense("cpu", replaced(base, **changes), case)


def replaced(case: PagedCase, **changes) -> PagedCase:
    return PagedCase(**(vars(case) | changes))


@st.composite
def cases(draw) -> PagedCase:
    causal = draw(st.booleans())
    requests = []
    for _ in range(draw(st.integers(1, 6))):
        query_len = draw(st.sampled_from([0, 1, 1, 1, 2, 5, 17]))
        requests.append((query_len, query_len and query_len + draw(st.sampled_from([0, 0, 1, 15, 16, 40]))))
    feature = draw(st.sampled_from([{}, {"alibi": True}, {"soft_cap": 2.0}, {"sinks": True}]))
    windows = [None, 1, 5, 40, (3, 0)] + ([] if causal else [(4, 2), (-1, 2), (3, -1)])
    return PagedCase(
        tuple(requests),
        num_heads=4,
        num_kv_heads=draw(st.sampled_from([1, 2, 4])),
        head_size=draw(st.sampled_from([8, 24])),
        block_size=draw(st.sampled_from([1, 3, 16, 48])),
        window=draw(st.sampled_from(windows)),
        causal=causal,
        layout=draw(st.sampled_from(list(LAYOUTS))),
        padded_rows=draw(st.integers(0, 2)),
        loose_bounds=draw(st.booleans()),
        **feature,
    )


@given(case=cases())
@settings(deadline=None, max_examples=60, derandomize=True)
def test_any_batch_equals_dense_attention(case):
    with pytest.MonkeyPatch.context() as patch:
        cut_short(patch, chunk_bytes=8_000)
        for name in RUNS:
            assert_equals_dense(name, case, "any batch")


def test_agrees_with_vllms_kernel():
    program = Path(__file__).with_name("attend_with_vllm.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout.splitlines()[-1])
    assert len(differences) == 11
    assert all(difference < 2e-6 for difference in differences.values()), differences  # no NaN either


def test_a_query_of_a_request_without_keys_gives_zeros(name):
    case = PagedCase(((2, 0), (1, 5), (2, 7), (1, 0)), causal=False)
    out = attended(name, case, "nothing to see")
    assert (out[[0, 1, 5]] == 0).all()
    assert (out[2:5] != 0).all()
    assert (attended(name, PagedCase(((2, 0), (1, 0)), causal=False), "nothing at all") == 0).all()


def test_a_batch_of_no_requests_is_left_alone(name):
    dtype = RUNS[name][0]
    none = torch.zeros(0, dtype=torch.int32)
    batch = PagedBatch(torch.zeros(1, dtype=torch.int32), none, none.view(0, 4), 0, 0)
    out = torch.full((2, 4, 64), UNTOUCHED, dtype=dtype)
    kv_cache = torch.full((3, 2, 16, 128), NAN, dtype=dtype)
    kernels_of("paged_attention")[name].run(out.clone(), kv_cache, batch, out, scale=0.125)
    assert (out == UNTOUCHED).all()


@pytest.mark.parametrize("causal", [False, True])
def test_a_packed_cache_serves_an_encoder(name, causal):
    dtype, slack = RUNS[name]
    rng = _samples.generator("encoder")
    lens = [9, 40, 0, 1]
    qkv = torch.randn(52, 8, 64, dtype=dtype, generator=rng)
    query, key, value = qkv.split((4, 2, 2), dim=1)
    query_start_loc = torch.tensor([0, 9, 49, 49, 50], dtype=torch.int32)
    batch = packed_batch(query_start_loc, max_query_len=40, causal=causal)
    out = torch.full((52, 4, 64), UNTOUCHED, dtype=dtype)
    kv_cache = packed_cache(key, value)
    assert kv_cache.shape == (52, 2, PACKED_BLOCK_SIZE, 128)
    kernels_of("paged_attention")[name].run(query, kv_cache, batch, out, scale=0.125)
    for q, k, v, o in zip(*(x[:50].double().split(lens) for x in (query, key, value, out)), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.125, enable_gqa=True)
        torch.testing.assert_close(o, expected[0].transpose(0, 1), rtol=slack, atol=slack)
    assert (out[50:] == UNTOUCHED).all()


def test_an_fp8_cache_is_attended_as_what_it_stands_for(name):
    case = PagedCase(MIXED.requests, cache_dtype=torch.float8_e4m3fn)
    (query, kv_cache, batch, out), options = case.make("fp8", "cpu", RUNS[name][0])
    options |= {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([3.0])}
    kernels_of("paged_attention")[name].run(query, kv_cache, batch, out, **options)
    key, value = kv_cache.double().chunk(2, dim=-1)
    expected = torch.empty_like(out, dtype=torch.float64)
    ops.paged_attention(
        query.double(), torch.cat((key * 0.5, value * 3), dim=-1), batch, expected, scale=options["scale"]
    )
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)


def test_the_reference_may_take_the_rows_in_parts(monkeypatch):
    monkeypatch.setitem(ops.paged_attention.reference.__globals__, "REFERENCE_ROWS", 4)
    assert_equals_dense("reference", PagedCase(((19, 30), (1, 7)), window=9), "parts")


def cost_of(case: PagedCase, dtype=torch.bfloat16):
    inputs, options = case.make("cost", "cpu", dtype)
    return ops.paged_attention.cost_of(*inputs, **options)


def test_cost_of_decoding_is_reading_the_keys():
    cost = cost_of(PagedCase(((1, 100), (1, 7), (0, 0))))
    assert cost.bytes == 2 * (2 * 2 * 4 * 64 + 107 * 2 * 128)
    assert cost.flops == 4 * 64 * 4 * 107


@pytest.mark.parametrize("case", CASES)
def test_cost_counts_what_is_seen(case):
    base, changes = CASES[case]
    case = replaced(base, **changes)
    pairs = keys = 0
    for query_len, seq_len in case.requests:
        first = seq_len - query_len
        seen = [[sees(case, first + i, j) for j in range(seq_len)] for i in range(query_len)]
        pairs += sum(map(sum, seen))
        keys += sum(map(any, zip(*seen, strict=True)))
    cost = cost_of(case)
    assert cost.flops == 4 * 64 * 4 * pairs
    assert cost.bytes == 2 * (2 * case.num_tokens * 4 * 64 + keys * case.num_kv_heads * 128)


def test_bench_cases_of_both_devices_can_be_described():
    from vllm_opset.ops.attention._paged_inputs import BENCH_CASES, BENCH_SHAPE

    for device, named in BENCH_CASES.items():
        for requests, options in named.values():
            case = PagedCase(requests, **BENCH_SHAPE[device], **options)
            assert case.num_tokens > 0 and all(0 < query_len <= seq_len for query_len, seq_len in requests)


def test_a_bench_sample_can_be_run():
    sample = next(iter(ops.paged_attention.bench_samples("cpu", torch.float32)))
    inputs, options = sample.make()
    kernels_of("paged_attention")["cpu"].run(*inputs, **options)
    out = torch.empty_like(inputs[3])
    ops.paged_attention(*inputs[:3], out, **options)
    torch.testing.assert_close(inputs[3], out, rtol=1e-5, atol=1e-5)
