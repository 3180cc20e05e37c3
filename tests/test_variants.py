"""Variants: which one runs a call, by the kernel's table and by a user's override."""

import pytest
import torch

from vllm_opset import ops
from vllm_opset.kernel import everything, kernel, kernels_of
from vllm_opset.model.filters import combinations
from vllm_opset.ops.attention._paged_inputs import PagedCase
from vllm_opset.overrides import OverrideError
from vllm_opset.selection import configure, select
from vllm_opset.variants import Limits, Variant, Variants, powers_up_to

WIDE = Variants(
    lambda rows: rows,
    Variant("few", can=lambda rows: rows <= 8, suits=lambda rows: rows <= 4),
    Variant("any"),
)


@pytest.fixture(autouse=True)
def own_overrides(monkeypatch):
    monkeypatch.delenv("OPSET_KERNELS", raising=False)
    yield
    monkeypatch.undo()
    configure()


@pytest.mark.parametrize(
    ("rows", "wanted", "runs"),
    [(4, None, "few"), (5, None, "any"), (5, "few", "few"), (9, "few", "any"), (1, "any", "any")],
)
def test_a_wanted_variant_runs_whatever_it_can(rows, wanted, runs):
    assert WIDE.of(wanted, rows) == runs


def test_the_last_variant_runs_any_call():
    with pytest.raises(ValueError, match="the last variant, few, must run any call"):
        Variants(lambda rows: rows, Variant("any"), Variant("few", can=bool))


def test_a_kernel_with_variants_takes_the_wanted_one():
    with pytest.raises(ValueError, match="relu2=mine has variants and no parameter"):
        kernel(ops.relu2, name="mine", supports=everything, variants=WIDE)(lambda x: x)


def test_the_sizes_of_a_warm_up_end_with_the_largest():
    assert [*powers_up_to(5)] == [1, 2, 4, 5] and [*powers_up_to(4)] == [1, 2, 4]


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("cpp:prefil", "paged_attention=cpp has no variant 'prefil'; known: decode, mixed, torch"),
        ("cpp:decod", "did you mean 'decode'"),
        ("cpu:decode", "paged_attention=cpu has no variants; leave out ':decode'"),
        (
            "cpp:",
            "OPSET_KERNELS: paged_attention=cpp: names no variant; leave out ':', or name one: decode, mixed, torch",
        ),
        ("cpu:", "paged_attention=cpu has no variants; leave out ':'"),
        ("cp:decode", "paged_attention has no kernel 'cp' here; did you mean 'cp"),
    ],
)
def test_a_variant_that_is_none_is_an_error(word, error, monkeypatch):
    monkeypatch.setenv("OPSET_KERNELS", f"paged_attention={word}")
    with pytest.raises(OverrideError, match=error):
        configure()


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("cpp", {"decode": 1, "mixed": 1, "torch": 1}),
        ("cpp:torch", {"torch": 3}),
        ("cpp:decode", {"decode": 3}),
        ("cpp:mixed", {"decode": 1, "mixed": 1, "torch": 1}),
    ],
)
def test_an_override_names_a_variant_whose_calls_are_counted(word, expected, monkeypatch):
    monkeypatch.setenv("OPSET_KERNELS", f"paged_attention={word}")
    monkeypatch.setenv("OPSET_COUNT_CALLS", "1")
    configure()
    for requests in (((1, 40),), ((33, 40), (0, 0)), ((33, 40), (1, 40))):
        case = PagedCase(requests, num_heads=4, head_size=64)
        args, kwargs = case.make("variants", "cpu", torch.float32)
        choice = select(ops.paged_attention, ops.paged_attention.problem_for(*args, **kwargs))
        result = args[-1]
        choice.run(*args, **kwargs)
        args, kwargs = case.make("variants", "cpu", torch.float32)
        ops.paged_attention(*args, **kwargs)
        torch.testing.assert_close(result, args[-1], rtol=1e-4, atol=1e-5)
    assert choice.name == word and choice.calls == expected


def test_one_row_of_linear_is_a_variant_of_its_own():
    variants = kernels_of("linear", elsewhere=True)["triton"].variants
    weight = torch.zeros(4, 8)
    assert [variants.of(None, torch.zeros(rows, 8), weight) for rows in (1, 2)] == ["one_row", "torch"]
    assert variants.of("one_row", torch.zeros(2, 8), weight) == "torch"  # it cannot
    quantised = {"weight_scale": torch.ones(1, 1), "out_dtype": torch.float32}
    assert variants.of(None, torch.zeros(1, 8), weight, **quantised) == "scaled"


def test_the_warm_up_of_the_sampler_reaches_each_variant():
    variants = kernels_of("top_k_top_p_sample", elsewhere=True)["triton"].variants
    logits, keys = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    found = {tuple(given): variants.of(None, logits, keys, **given) for given in combinations(logits.device)}
    assert found[()] == "unfiltered" and found["top_k",] == "top_k" and found["min_p",] == "all_filters"
    assert len(found) == 8 and set(found.values()) == set(variants.by_name)


def test_the_warm_up_of_attention_reaches_each_variant():
    variants = kernels_of("paged_attention", elsewhere=True)["triton"].variants
    found = set()
    for sizes in variants.warm(Limits(max_num_batched_tokens=256, max_num_seqs=8, max_model_len=512)):
        requests = tuple((n, max(n, 2)) for n in sizes.query_lens)
        (query, cache, batch, out), options = PagedCase(requests, num_heads=8, head_size=64).make(
            "warm", "cpu", torch.bfloat16
        )
        found.add(variants.of(None, query, cache, batch, out, scale=options["scale"]))
    assert found >= {"decode", "verify"} and found & {"prefill", "prefill_sm90"}
