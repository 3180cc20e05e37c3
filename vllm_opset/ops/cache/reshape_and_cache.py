"""reshape_and_cache: writes the keys and values of new tokens into their slots of the paged KV cache.

Semantics: vLLM's `reshape_and_cache_flash` (csrc/cache_kernels.cu), on a cache that holds key and value side by side.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops.attention._paged_inputs import LAYOUTS, NAN, SPLIT_KV, poisoned_cache, scales
from vllm_opset.ops.attention.paged_batch import keys_and_values
from vllm_opset.ops.contract import Cost, Problem, Sample, Tolerance, op

EXACT = Tolerance(0.0, 0.0, "copied")
TOLERANCES = {
    **dict.fromkeys((torch.float64, torch.float32, torch.bfloat16, torch.float16), EXACT),
    torch.float8_e4m3fn: Tolerance(2**-4, 2**-10, "rounded to 4 bits of mantissa, or to a multiple of 2**-9"),
}


@dataclass(frozen=True)
class ReshapeAndCacheProblem(Problem):
    """dtype: dtype of key and value. split_kv_layout: whether the last dimensions of the cache are [2, head_size]."""

    kv_cache_dtype: torch.dtype
    num_kv_heads: int
    head_size: int
    block_size: int
    split_kv_layout: bool = False


@op(problem=ReshapeAndCacheProblem, mutates=("kv_cache",), tolerances=TOLERANCES)
def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """kv_cache[slot // block_size, :, slot % block_size] = (key, value) of each token, where its slot is not negative.

    key, value: [T, num_kv_heads, head_size], any strides.

    kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], any strides. The key goes to the first half of the
    last dimension. This dimension may also be split into [2, head_size]: see `paged_batch`.

    slot_mapping: int32 or int64 [T'], T' <= T. Tokens from T' on are padding, and so are tokens with a negative slot
    (vLLM: −1). No two tokens have the same slot.

    k_scale, v_scale: fp32, one element. Keys and values are divided by them before they are rounded to an fp8 cache.
    Results beyond the range of fp8 become its largest value.

    Raises ValueError if the shapes do not fit each other, IndexError for a slot that the cache does not have.
    """
    check_arguments(key, value, kv_cache, slot_mapping)
    block_size = kv_cache.shape[2]
    tokens = torch.nonzero(slot_mapping >= 0).squeeze(1)
    slots = slot_mapping[tokens].long()
    keys, values = keys_and_values(kv_cache)
    for half, new, scale in ((keys, key, k_scale), (values, value, v_scale)):
        half[slots // block_size, :, slots % block_size] = to_cache_dtype(new[tokens], scale, kv_cache.dtype)


def check_arguments(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Refuses shapes that do not fit each other."""
    num_tokens, num_kv_heads, head_size = slot_mapping.shape[0], kv_cache.shape[1], kv_cache.shape[3:].numel() // 2
    if key.shape != value.shape or key.shape[0] < num_tokens or key.shape[1:] != (num_kv_heads, head_size):
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} do not fit {num_tokens} slots "
            f"of a cache {tuple(kv_cache.shape)}"
        )


def to_cache_dtype(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """A key or value as the cache stores it."""
    if scale is not None:
        x = x / scale
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


@reshape_and_cache.problem_of
def _(key, value, kv_cache, slot_mapping, k_scale=None, v_scale=None) -> ReshapeAndCacheProblem:
    _, num_kv_heads, block_size, *row = kv_cache.shape
    head_size, split = math.prod(row) // 2, len(row) == 2
    return ReshapeAndCacheProblem(
        key.device.type, key.dtype, kv_cache.dtype, num_kv_heads, head_size, block_size, split
    )


@reshape_and_cache.cost
def _(key, value, kv_cache, slot_mapping, k_scale=None, v_scale=None) -> Cost:
    """Reads and writes the tokens that have a slot, and no others."""
    elements = int((slot_mapping >= 0).sum()) * kv_cache.shape[1] * kv_cache.shape[3:].numel()
    return Cost(bytes=elements * (key.element_size() + kv_cache.element_size()) + slot_mapping.nbytes, flops=0)


def _inputs(
    seed: str,
    device: str,
    dtype: torch.dtype,
    slots: list[int],
    *,
    num_kv_heads: int = 2,
    head_size: int = 64,
    block_size: int = 16,
    num_blocks: int = 5,
    layout: str = "HND",
    slot_dtype: torch.dtype = torch.int64,
    padded_rows: int = 0,
    cache_dtype: torch.dtype | None = None,
) -> tuple[tuple, dict]:
    """Arguments whose key and value are slices of one projection's result, NaN in rows of padding or without a slot."""
    rng = _samples.generator(seed)
    num_tokens = len(slots) + padded_rows
    qkv = torch.full((num_tokens, 4, num_kv_heads, head_size), NAN, dtype=dtype, device=device)
    used = [token for token, slot in enumerate(slots) if slot >= 0]
    qkv[used, 2:] = _samples.normal((len(used), 2, num_kv_heads, head_size), dtype, device, rng)
    row = torch.empty(2 * head_size, dtype=cache_dtype or dtype, device=device)
    kv_cache = poisoned_cache(layout, num_blocks, num_kv_heads, block_size, row)
    options = {} if cache_dtype is None else scales(device)
    return (qkv[:, 2], qkv[:, 3], kv_cache, torch.tensor(slots, dtype=slot_dtype, device=device)), options


@reshape_and_cache.sample_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    some = [31, 32, 0, 79, 5, 6, 64]
    split = {"layout": SPLIT_KV}
    for name, slots, options in (
        ("zero tokens", [], {}),
        ("one token", [17], {}),
        ("a prompt", list(range(16, 56)), {}),
        ("some tokens", some, {}),
        ("int32 slots", some, {"slot_dtype": torch.int32}),
        ("tokens without a slot", [-1, 31, -1, 0, 79, -1], {}),
        ("no token has a slot", [-1, -1], {}),
        ("fewer slots than tokens", some, {"padded_rows": 3}),
        ("one head", some, {"num_kv_heads": 1}),
        ("odd number of heads", some, {"num_kv_heads": 3}),
        ("block size 48", some, {"block_size": 48}),
        ("block size 1", [3, 0], {"block_size": 1}),
        ("fp8 cache", some, {"cache_dtype": torch.float8_e4m3fn}),
        *((f"head size {size}", some, {"head_size": size}) for size in (80, 120, 128, 256)),
        *((layout, some, {"layout": layout}) for layout in LAYOUTS),
        (SPLIT_KV, some, split),
        (f"{SPLIT_KV}, zero tokens", [], split),
        (f"{SPLIT_KV}, a prompt", list(range(16, 56)), split),
        (f"{SPLIT_KV}, int32 slots", some, split | {"slot_dtype": torch.int32}),
        (f"{SPLIT_KV}, tokens without a slot", [-1, 31, -1, 0, 1, 79, -1], split),
        (f"{SPLIT_KV}, no token has a slot", [-1, -1], split),
        (f"{SPLIT_KV}, fewer slots than tokens", some, split | {"padded_rows": 3}),
        (f"{SPLIT_KV}, odd number of heads", some, split | {"num_kv_heads": 3}),
        (f"{SPLIT_KV}, block size 128", [*some, 128, 639], split | {"block_size": 128, "head_size": 128}),
    ):
        yield Sample(
            name, lambda name=name, slots=slots, options=options: _inputs(name, device, dtype, slots, **options)
        )


@reshape_and_cache.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name: str, change: Callable[..., tuple]) -> Sample:
        return Sample(name, lambda: (change(*_inputs("illegal", device, dtype, [3, 17])[0]), {}))

    yield sample("one head for all", lambda key, value, cache, slots: (key[:, :1], value[:, :1], cache, slots))
    yield sample("values of other heads", lambda key, value, cache, slots: (key, value[:, :1], cache, slots))
    yield sample("another head size", lambda key, value, cache, slots: (key[..., :1], value[..., :1], cache, slots))
    yield sample("fewer tokens than slots", lambda key, value, cache, slots: (key[:1], value[:1], cache, slots))


@reshape_and_cache.bench_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(num_tokens: int) -> Sample:
        def make():
            num_blocks = max(64, 2 * num_tokens // 16)
            slots = torch.randperm(num_blocks * 16, generator=_samples.generator("slots"))[:num_tokens].tolist()
            options = {"num_kv_heads": 8, "head_size": 128, "num_blocks": num_blocks}
            return _inputs("bench", device, dtype, slots, **options)

        return Sample(f"T{num_tokens}", make)

    for num_tokens in _samples.bench_tokens(device):
        yield sample(num_tokens)


@reshape_and_cache.property_
def tokens_in_any_order_give_the_same_cache(run, device: str, dtype: torch.dtype) -> None:
    (key, value, kv_cache, slots), _ = _inputs("order", device, dtype, [31, 32, 0, 79, 5, -1, 64])
    other = kv_cache.clone()
    run(key, value, kv_cache, slots)
    order = torch.randperm(len(slots), generator=_samples.generator("order")).to(device)
    run(key[order], value[order], other, slots[order])
    _properties.equal("another order of the tokens changes the cache", other.nan_to_num(), kv_cache.nan_to_num())
