"""Code that `rope_cache` and `qk_norm_rope_cache` share: problem, argument checks, cost and inputs."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vllm_opset.ops import _samples
from vllm_opset.ops.attention._paged_inputs import LAYOUTS, poisoned_cache, scales
from vllm_opset.ops.cache.reshape_and_cache import TOLERANCES as CACHE_TOLERANCES
from vllm_opset.ops.cache.reshape_and_cache import check_arguments as check_cache
from vllm_opset.ops.contract import ROUND_ONCE, Cost, Problem
from vllm_opset.ops.rope.rotary_embedding import check_arguments as check_rotary
from vllm_opset.ops.rope.rotary_embedding import table

TOLERANCES = CACHE_TOLERANCES | ROUND_ONCE
SLOTS = (31, 32, 0, 79, 5, 6, 64)


@dataclass(frozen=True)
class FusedRopeProblem(Problem):
    """dtype: dtype of query, key and value. weight_dtype: dtype of the norms' weights; None if there are no norms."""

    kv_cache_dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_size: int
    rotary_dim: int
    is_neox_style: bool
    weight_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, query, key, cos_sin_cache, is_neox_style, kv_cache, weight=None) -> "FusedRopeProblem":
        heads = query.shape[1], key.shape[1], query.shape[2]
        weight_dtype = None if weight is None else weight.dtype
        kind = query.device.type, query.dtype, kv_cache.dtype
        return cls(*kind, *heads, cos_sin_cache.shape[1], is_neox_style, weight_dtype)


def check_arguments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Refuses shapes that do not fit each other, before anything is written."""
    if query.dim() != 3 or key.dim() != 3 or query.shape[::2] != key.shape[::2]:
        raise ValueError(
            "query and key must be [T, heads, head_size], of one T and head_size, "
            f"not {list(query.shape)} and {list(key.shape)}"
        )
    if kv_cache.dim() != 4:
        raise ValueError(f"the cache must have the value beside the key, not be {list(kv_cache.shape)}")
    check_rotary(positions, query, key, key.shape[2], cos_sin_cache)
    check_cache(key, value, kv_cache, slot_mapping)


def cost_of(query, key, positions, cos_sin_cache, kv_cache, slot_mapping, *, flops_per_element: int) -> Cost:
    """Reads and writes the query. For tokens that have a slot, reads key and value and writes the slot."""
    cached = int((slot_mapping >= 0).sum()) * 2 * key[0:1].numel()
    table_bytes = positions.numel() * cos_sin_cache.shape[1] * cos_sin_cache.element_size()
    moved = 2 * query.nbytes + cached * (key.element_size() + kv_cache.element_size()) + table_bytes
    flops = flops_per_element * (query.numel() + cached // 2)
    return Cost(bytes=moved + positions.nbytes + slot_mapping.nbytes, flops=flops)


@dataclass(frozen=True)
class RopeCase:
    """One call.

    slots: the slots of the tokens; `padded_rows` further tokens have none. padded_columns: the number of columns after
    query, key and value in their projection. cache_dtype: None for the dtype of the query.
    """

    slots: tuple[int, ...] = SLOTS
    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    rotary: int | None = None
    neox: bool = True
    layout: str = "HND"
    num_blocks: int = 5
    block_size: int = 16
    table_rows: int = 128
    padded_rows: int = 0
    padded_columns: int = 8
    index: torch.dtype = torch.int64
    table_dtype: torch.dtype | None = None
    cache_dtype: torch.dtype | None = None

    def query_key_value(
        self, rng: torch.Generator, device: str, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value, as slices of one projection's result."""
        shapes = [(len(self.slots) + self.padded_rows, n * self.size) for n in (self.heads, *[self.kv_heads] * 2)]
        parts = (_samples.normal(shape, dtype, device, rng) for shape in shapes)
        wide = _samples.side_by_side(*parts, padding=self.padded_columns)
        query, key, value = (x.unflatten(1, (-1, self.size)) for x in wide)
        return query, key, value

    def rest(self, rng: torch.Generator, device: str, dtype: torch.dtype) -> tuple[tuple, dict]:
        """positions, cos_sin_cache, is_neox_style, kv_cache, slot_mapping, and the scales of an fp8 cache by name."""
        tokens = len(self.slots) + self.padded_rows
        positions = torch.randint(self.table_rows, (tokens,), generator=rng, device=rng.device).to(device, self.index)
        rows = table(self.table_rows, self.rotary or self.size, self.table_dtype or dtype, device)
        row = torch.empty(2 * self.size, dtype=self.cache_dtype or dtype, device=device)
        kv_cache = poisoned_cache(self.layout, self.num_blocks, self.kv_heads, self.block_size, row)
        slots = torch.tensor(self.slots, dtype=self.index, device=device)
        options = {} if self.cache_dtype is None else scales(device)
        return (positions, rows, self.neox, kv_cache, slots), options


def cases() -> Iterator[tuple[str, RopeCase]]:
    """The cases for parity."""
    yield "zero tokens", RopeCase(slots=())
    yield "one token", RopeCase(slots=(17,))
    yield "one head", RopeCase(heads=1, kv_heads=1)
    for neox, style in ((True, "NeoX"), (False, "GPT-J")):
        yield style, RopeCase(neox=neox)
        yield f"{style}, partial", RopeCase(size=96, rotary=24, neox=neox)
        yield f"{style}, fp8 cache", RopeCase(neox=neox, cache_dtype=torch.float8_e4m3fn)
    yield "tokens without a slot", RopeCase(slots=(-1, 31, -1, 0))
    yield "fewer slots than tokens", RopeCase(padded_rows=3)
    yield "int32 positions and slots", RopeCase(index=torch.int32)
    yield "fp32 table", RopeCase(table_dtype=torch.float32)
    yield "odd numbers of heads", RopeCase(heads=7, kv_heads=1, size=80)
    yield "block size 48", RopeCase(block_size=48)
    yield "head size 256", RopeCase(heads=2, kv_heads=1, size=256)
    yield "Qwen3-8B heads", RopeCase(slots=(3, 64), heads=32, kv_heads=8, size=128)
    for layout in LAYOUTS:
        yield layout, RopeCase(layout=layout)


def bench_cases(device: str) -> Iterator[tuple[str, RopeCase]]:
    """The cases for benchmarks: the heads of Qwen3-8B, with slots in random order."""
    for tokens in _samples.bench_tokens(device):
        num_blocks = max(64, 2 * tokens // 16)
        slots = torch.randperm(num_blocks * 16, generator=_samples.generator("slots"))[:tokens].tolist()
        shape = {
            "heads": 32,
            "kv_heads": 8,
            "size": 128,
            "num_blocks": num_blocks,
            "table_rows": 4096,
            "padded_columns": 0,
        }
        yield f"T{tokens} H32/8 D128", RopeCase(slots=tuple(slots), **shape)
