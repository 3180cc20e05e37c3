"""qk_norm_rope_cache: normalises the heads of queries and keys, rotates them, and writes the KV cache, in one pass.

Semantics: `rms_norm` of each head of query and key, then `rope_cache`, without rounding in between. Qwen3 and Gemma 3
have these norms between projection and attention.
"""

from collections.abc import Iterator

import torch

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops.contract import Cost, Sample, accumulator, op
from vllm_opset.ops.norm.rms_norm import check_parameter, rms_norm
from vllm_opset.ops.rope import _fused_rope
from vllm_opset.ops.rope._fused_rope import FusedRopeProblem, RopeCase
from vllm_opset.ops.rope.rope_cache import rope_cache


@op(problem=FusedRopeProblem, mutates=("query", "kv_cache"), tolerances=_fused_rope.TOLERANCES)
def qk_norm_rope_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    epsilon: float,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> None:
    """rope_cache of rms_norm(query, q_weight), rms_norm(key, k_weight) and value, each head on its own. Rounded once.

    q_weight, k_weight: [head_size], of query's dtype or fp32. epsilon, weight_offset: as in `rms_norm`. Everything else
    is as in `rope_cache`: the query changes in place, key and value stay as they are.
    Raises ValueError if shapes do not fit each other, IndexError for a slot that the cache does not have.
    """
    _fused_rope.check_arguments(query, key, value, positions, cos_sin_cache, kv_cache, slot_mapping)
    check_parameter(q_weight, query)
    check_parameter(k_weight, key)
    wide = accumulator(query, cos_sin_cache)
    new_query = rms_norm(query.to(wide), q_weight, epsilon, weight_offset)
    new_key = rms_norm(key.to(wide), k_weight, epsilon, weight_offset)
    rope_cache(
        new_query, new_key, value.to(wide), positions, cos_sin_cache, is_neox_style, kv_cache, slot_mapping,
        k_scale, v_scale,
    )  # fmt: skip
    query.copy_(new_query)


@qk_norm_rope_cache.problem_of
def _(
    query, key, value, q_weight, k_weight, epsilon, positions, cos_sin_cache, is_neox_style, kv_cache, slot_mapping,
    k_scale=None, v_scale=None, weight_offset=0.0,
) -> FusedRopeProblem:  # fmt: skip
    return FusedRopeProblem.of(query, key, cos_sin_cache, is_neox_style, kv_cache, q_weight)


@qk_norm_rope_cache.cost
def _(
    query, key, value, q_weight, k_weight, epsilon, positions, cos_sin_cache, is_neox_style, kv_cache, slot_mapping,
    k_scale=None, v_scale=None, weight_offset=0.0,
) -> Cost:  # fmt: skip
    return _fused_rope.cost_of(query, key, positions, cos_sin_cache, kv_cache, slot_mapping, flops_per_element=7)


def _sample(
    name: str, case: RopeCase, device: str, dtype: torch.dtype, weight_dtype=None, *, on="cpu", **options
) -> Sample:
    def make():
        rng = _samples.generator(name, on)
        tokens = case.query_key_value(rng, device, dtype)
        weights = [_samples.normal((case.size,), weight_dtype or dtype, device, rng) for _ in range(2)]
        rest, scales = case.rest(rng, device, dtype)
        return (*tokens, *weights, 1e-6, *rest), scales | options

    return Sample(name, make)


@qk_norm_rope_cache.sample_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    yield from (_sample(name, case, device, dtype) for name, case in _fused_rope.cases())
    yield _sample("Gemma: weight + 1", RopeCase(), device, dtype, weight_offset=1.0)
    yield _sample("fp32 weights", RopeCase(), device, dtype, torch.float32)


@qk_norm_rope_cache.bench_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    yield from (_sample(name, case, device, dtype, on=device) for name, case in _fused_rope.bench_cases(device))


@qk_norm_rope_cache.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name: str, q_weight: int, k_weight: int) -> Sample:
        def make():
            (query, key, value, _, _, *rest), options = _sample(name, RopeCase(), device, dtype).make()
            weights = (torch.ones(size, dtype=dtype, device=device) for size in (q_weight, k_weight))
            return (query, key, value, *weights, *rest), options

        return Sample(name, make)

    yield sample("a query weight of one element", 1, 64)
    yield sample("a key weight of one element", 64, 1)


@qk_norm_rope_cache.property_
def scale_invariant(run, device: str, dtype: torch.dtype) -> None:
    """Without epsilon, multiplying queries and keys by powers of two changes no bit of the result."""
    results = []
    for factor in (1, 4):
        (query, key, value, q_weight, k_weight, _, *rest), _ = _sample("scale", RopeCase(), device, dtype).make()
        run(query.mul_(factor), key.mul_(factor), value, q_weight, k_weight, 0.0, *rest)
        results.append((query, rest[3].nan_to_num()))
    for small, large in zip(*results, strict=True):
        _properties.equal("the norm is not that of the head", large, small)
