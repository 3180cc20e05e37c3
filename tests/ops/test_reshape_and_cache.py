"""reshape_and_cache against a loop over tokens and heads that writes each key and value to its place."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_opset import ops
from vllm_opset.kernel import kernels_of
from vllm_opset.ops import _samples
from vllm_opset.ops.attention._paged_inputs import LAYOUTS, NAN, poisoned_cache
from vllm_opset.ops.cache.reshape_and_cache import to_cache_dtype

FP8 = torch.float8_e4m3fn


@pytest.fixture(params=["reference", "cpu"])
def run(request):
    return kernels_of("reshape_and_cache")[request.param].run


def key_and_value(num_tokens: int, num_kv_heads=2, head_size=8, dtype=torch.float32):
    rng = _samples.generator("key and value")
    qkv = _samples.normal((num_tokens, 4 * num_kv_heads, head_size), dtype, "cpu", rng)
    return qkv[:, 2 * num_kv_heads : 3 * num_kv_heads], qkv[:, 3 * num_kv_heads :]


def one_by_one(key, value, kv_cache, slots: list[int]) -> torch.Tensor:
    """The expected cache, as a dense tensor."""
    expected = kv_cache.clone(memory_format=torch.contiguous_format)
    size = key.shape[2]
    for token, slot in enumerate(slots):
        for head in range(key.shape[1]):
            if slot >= 0:
                block, place = divmod(slot, kv_cache.shape[2])
                expected[block, head, place, :size] = key[token, head]
                expected[block, head, place, size:] = value[token, head]
    return expected


def assert_holds(kv_cache: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(kv_cache, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_puts_each_token_in_its_slot(run, layout, slot_dtype, dtype):
    slots = [17, -1, 0, 31, 32, -1, 79]
    key, value = key_and_value(9, dtype=dtype)
    kv_cache = poisoned_cache(layout, 5, 2, 16, torch.empty(16, dtype=dtype))
    expected = one_by_one(key, value, kv_cache, slots)
    run(key, value, kv_cache, torch.tensor(slots, dtype=slot_dtype))
    assert_holds(kv_cache, expected)
    assert int((~kv_cache.isnan()).sum()) == 5 * 2 * 16


@pytest.mark.parametrize("name", ["reference", "cpu"])
@given(data=st.data())
@settings(deadline=None, max_examples=40, derandomize=True)
def test_any_tokens_anywhere(name, data):
    num_kv_heads, block_size, num_blocks = (data.draw(st.integers(1, high)) for high in (3, 20, 4))
    places = st.integers(0, num_blocks * block_size - 1)
    slots = data.draw(st.lists(places, unique=True, max_size=12))
    for hole in data.draw(st.lists(st.integers(0, len(slots)), max_size=3)):
        slots.insert(hole, data.draw(st.sampled_from([-1, -7])))
    key, value = key_and_value(len(slots) + data.draw(st.integers(0, 2)), num_kv_heads)
    layout = data.draw(st.sampled_from(list(LAYOUTS)))
    kv_cache = poisoned_cache(layout, num_blocks, num_kv_heads, block_size, torch.empty(16))
    expected = one_by_one(key, value, kv_cache, slots)
    kernels_of("reshape_and_cache")[name].run(key, value, kv_cache, torch.tensor(slots, dtype=torch.int64))
    assert_holds(kv_cache, expected)


@pytest.mark.parametrize("slots", [[80], [3, 1000]])
def test_a_slot_that_the_cache_does_not_have_raises(run, slots):
    key, value = key_and_value(len(slots))
    with pytest.raises(IndexError):
        run(key, value, torch.zeros(5, 2, 16, 16), torch.tensor(slots))


def test_an_fp8_cache_holds_what_is_left_of_the_scaled_values(run, dtype):
    key, value = key_and_value(3, dtype=dtype)
    kv_cache = torch.full((2, 2, 16, 16), NAN).to(FP8)
    k_scale, v_scale = torch.tensor([0.5]), torch.tensor(4.0)
    run(key, value, kv_cache, torch.tensor([5, -1, 20]), k_scale, v_scale)
    for token, slot in ((0, 5), (2, 20)):
        block, place = divmod(slot, 16)
        got_key, got_value = kv_cache[block, :, place].float().chunk(2, dim=-1)
        # The tolerances are half a step of the 3 mantissa bits, and half of the smallest step.
        torch.testing.assert_close(got_key * 0.5, key[token].float(), rtol=2**-4, atol=2**-11)
        torch.testing.assert_close(got_value * 4, value[token].float(), rtol=2**-4, atol=2**-8)
        assert not torch.equal(got_key * 0.5, key[token].float()), "nothing was rounded"
    assert int((~kv_cache.float().isnan()).sum()) == 2 * 2 * 16


def test_what_fp8_cannot_hold_becomes_its_largest_value():
    x = torch.tensor([1.0, 100.0, -1e4, float("inf"), NAN])
    stored = to_cache_dtype(x, torch.tensor(0.125), FP8).float()
    torch.testing.assert_close(stored, torch.tensor([8.0, 448.0, -448.0, 448.0, NAN]), equal_nan=True)


def test_a_half_precision_cache_keeps_infinities(run):
    key, value = (x * 1e6 for x in key_and_value(1))
    kv_cache = torch.zeros(1, 2, 16, 16, dtype=torch.float16)
    run(key, value, kv_cache, torch.tensor([0]))
    assert kv_cache[0, :, 0].isinf().any()


@pytest.mark.parametrize(
    ("shape", "num_slots"), [((3, 1, 8), 3), ((3, 2, 4), 3), ((2, 2, 8), 3), ((3, 2, 16), 3)], ids=str
)
def test_shapes_that_do_not_fit_are_refused(run, shape, num_slots):
    with pytest.raises(ValueError, match=rf"do not fit {num_slots} slots of a cache \(5, 2, 16, 16\)"):
        run(torch.zeros(shape), torch.zeros(shape), torch.zeros(5, 2, 16, 16), torch.arange(num_slots))


def test_cost_is_a_copy_of_the_tokens_that_have_a_slot():
    key, value = key_and_value(4, dtype=torch.bfloat16)
    inputs = (key, value, torch.zeros(1, 2, 16, 16, dtype=FP8), torch.tensor([1, -1, 3]))
    assert ops.reshape_and_cache.cost_of(*inputs).bytes == 2 * 2 * 16 * (2 + 1) + 3 * 8
