"""rope_cache: rotates queries and keys, and writes keys and values to the paged KV cache, in one pass over them.

Semantics: `rotary_embedding` followed by `reshape_and_cache`, without rounding in between.
"""

from collections.abc import Iterator

import torch

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops.cache.reshape_and_cache import reshape_and_cache
from vllm_opset.ops.contract import Cost, Sample, accumulator, op
from vllm_opset.ops.rope import _fused_rope
from vllm_opset.ops.rope._fused_rope import FusedRopeProblem, RopeCase
from vllm_opset.ops.rope.rotary_embedding import rotary_embedding


@op(problem=FusedRopeProblem, mutates=("query", "kv_cache"), tolerances=_fused_rope.TOLERANCES)
def rope_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """query <- rotated(query), in place; kv_cache[slot of each token] = (rotated(key), value). In fp32, rounded once.

    The rotated key is written only to the cache, because attention reads it there. `key` stays as it is.

    query: [T, H, head_size]; key, value: [T, num_kv_heads, head_size]; any strides, such as slices of a fused
    projection.

    positions, cos_sin_cache, is_neox_style: as in `rotary_embedding`.

    kv_cache, slot_mapping, k_scale, v_scale: as in `reshape_and_cache`. A token without a slot is not cached, but its
    query is rotated.

    Raises ValueError if shapes do not fit each other, IndexError for a slot that the cache does not have.
    """
    _fused_rope.check_arguments(query, key, value, positions, cos_sin_cache, kv_cache, slot_mapping)
    wide = accumulator(query, cos_sin_cache)
    new_query, new_key = query.to(wide, copy=True), key.to(wide, copy=True)
    rotary_embedding(positions, new_query, new_key, key.shape[2], cos_sin_cache, is_neox_style)
    query.copy_(new_query)
    reshape_and_cache(new_key, value.to(wide), kv_cache, slot_mapping, k_scale, v_scale)


@rope_cache.problem_of
def _(
    query, key, value, positions, cos_sin_cache, is_neox_style, kv_cache, slot_mapping, k_scale=None, v_scale=None
) -> FusedRopeProblem:
    return FusedRopeProblem.of(query, key, cos_sin_cache, is_neox_style, kv_cache)


@rope_cache.cost
def _(
    query, key, value, positions, cos_sin_cache, is_neox_style, kv_cache, slot_mapping, k_scale=None, v_scale=None
) -> Cost:
    return _fused_rope.cost_of(query, key, positions, cos_sin_cache, kv_cache, slot_mapping, flops_per_element=3)


def _sample(name: str, case: RopeCase, device: str, dtype: torch.dtype, *, on: str = "cpu") -> Sample:
    def make():
        rng = _samples.generator(name, on)
        tokens = case.query_key_value(rng, device, dtype)
        rest, scales = case.rest(rng, device, dtype)
        return (*tokens, *rest), scales

    return Sample(name, make)


@rope_cache.sample_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    yield from (_sample(name, case, device, dtype) for name, case in _fused_rope.cases())


@rope_cache.bench_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    yield from (_sample(name, case, device, dtype, on=device) for name, case in _fused_rope.bench_cases(device))


@rope_cache.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name: str, *, query=(2, 4, 64), key=(2, 2, 64), value=(2, 2, 64), positions=2, slots=2) -> Sample:
        def make():
            tokens = (torch.ones(shape, dtype=dtype, device=device) for shape in (query, key, value))
            rest, _ = RopeCase(slots=tuple(range(slots))).rest(_samples.generator(name), device, dtype)
            return (*tokens, torch.zeros(positions, dtype=torch.int64, device=device), *rest[1:]), {}

        return Sample(name, make)

    yield sample("a query of other tokens", query=(1, 4, 64))
    yield sample("a query of other heads", query=(2, 4, 32))
    yield sample("a query without heads", query=(2, 256))
    yield sample("a value of other heads", value=(2, 1, 64))
    yield sample("one position for two tokens", positions=1)
    yield sample("more slots than tokens", slots=3)


@rope_cache.property_
def the_same_as_one_after_the_other(run, device: str, dtype: torch.dtype) -> None:
    """Equals `rotary_embedding`, then `reshape_and_cache`: values bit for bit, queries and keys up to a rounding."""
    slack = torch.finfo(dtype).eps
    for neox in (True, False):
        (query, key, value, *rest), _ = _sample("property", RopeCase(neox=neox), device, dtype).make()
        positions, rows, _, kv_cache, slots = rest
        expected = torch.zeros_like(kv_cache)
        kv_cache.zero_()
        new_query, new_key = query.clone(), key.clone()
        rotary_embedding(positions, new_query, new_key, 64, rows, neox)
        reshape_and_cache(new_key, value, expected, slots)
        run(query, key, value, *rest)
        _properties.equal("values differ", kv_cache[..., 64:], expected[..., 64:])
        _properties.equal("queries differ", query, new_query, rtol=slack, atol=slack)
        _properties.equal("keys differ", kv_cache, expected, rtol=slack, atol=slack)
