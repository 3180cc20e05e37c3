"""rotary_embedding: rotates pairs of a head's elements by angles that grow with the token's position (RoPE).

Semantics: vLLM's `RotaryEmbedding.forward_native` and `_custom_ops.rotary_embedding`. vLLM's scaled variants differ
only in their tables of cosines and sines, so this op serves all of these:

- RotaryEmbedding; Llama3, Linear, NTK, DynamicNTK, DynamicNTKAlpha and YaRN scaling (the table holds YaRN's magnitude,
  so cos² + sin² may exceed 1); Gemma4's proportional one (the angles of the unrotated pairs are 0).

- Phi3LongRoPEScaled: its table is the short one followed by the long one. `cos_sin_cache` is the half in use.

- MRotaryEmbedding, with positions for time, height and width: the layer takes each pair's cosine and sine from the row
  of that pair's section. The result is a table with one row for each token, and `positions` is arange(T).

- DeepseekScaling (the leading slice); DeepseekV4Scaling on a view of the trailing slice, whose width is `head_size`.

This op does not serve FourierRotaryEmbedding (a table for each head), Llama4VisionRotaryEmbedding (complex,
two-dimensional) and DualChunkRotaryEmbedding (several queries from one).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops.contract import Cost, Problem, Sample, accumulator, op


@dataclass(frozen=True)
class RotaryProblem(Problem):
    """head_size, rotary_dim, is_neox_style: as in the op. table_dtype: of cos_sin_cache; None for query's dtype."""

    head_size: int
    rotary_dim: int
    is_neox_style: bool
    table_dtype: torch.dtype | None = None


@op(problem=RotaryProblem, mutates=("query", "key"))
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool = True,
) -> None:
    """(a, b) <- (a · cos − b · sin, b · cos + a · sin) for each pair (a, b) of each head, in fp32 and rounded once.

    Row positions[t] of the table holds the cosines of token t, then its sines, one of each for each pair. Pair i of a
    head is elements (i, i + rotary_dim/2) in NeoX style, and (2i, 2i + 1), interleaved, in GPT-J style. Elements from
    rotary_dim on stay as they are.

    positions: [T], int32 or int64. Each is a row of the table, which is not checked on a GPU.

    query: [T, H * head_size] or [T, H, head_size], any strides, such as a slice of a fused projection. key: the same
    with its own H, or None. T may be 0.

    cos_sin_cache: [rows, rotary_dim], rotary_dim <= head_size; of query's dtype or fp32.

    Writes to query and key, and returns nothing.
    Raises ValueError if shapes disagree, rotary_dim is odd or exceeds head_size, or there is not one position a token.
    """
    rotary_dim = check_arguments(positions, query, key, head_size, cos_sin_cache)
    dtype = accumulator(query, cos_sin_cache)
    cos, sin = cos_sin_cache.index_select(0, positions).to(dtype).unsqueeze(1).chunk(2, dim=-1)
    for x in (query, key):
        if x is not None:
            rotated = pairs(x, head_size, rotary_dim, is_neox_style)
            a, b = rotated.to(dtype).unbind(2)
            rotated.copy_(torch.stack((a * cos - b * sin, b * cos + a * sin), dim=2))


def pairs(x: torch.Tensor, head_size: int, rotary_dim: int, is_neox_style: bool) -> torch.Tensor:
    """The rotated elements as a view [T, H, 2, rotary_dim / 2] of x. Dimension 2 holds the two elements of a pair."""
    tokens, half = len(x), rotary_dim // 2
    heads = x.numel() // max(1, tokens * head_size)
    if rotary_dim < head_size:
        x = x.view(tokens, heads, head_size)[..., :rotary_dim]
    return x.view(tokens, heads, 2, half) if is_neox_style else x.view(tokens, heads, half, 2).mT


def check_arguments(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
) -> int:
    """Refuses shapes that would broadcast or reach into the next head unnoticed. Returns rotary_dim."""
    rotary_dim = cos_sin_cache.shape[-1]
    if rotary_dim % 2 or rotary_dim > head_size:
        raise ValueError(f"rows of cos_sin_cache must be even and at most head_size={head_size} wide, not {rotary_dim}")
    for x in (query,) if key is None else (query, key):
        shape = x.shape
        if shape[:1] != positions.shape:
            raise ValueError(f"{shape[0]} tokens need positions [{shape[0]}], not {list(positions.shape)}")
        if shape[-1] % head_size or (len(shape) != 2 and shape[2:] != (head_size,)):
            raise ValueError(f"query and key must be [T, H * {head_size}] or [T, H, {head_size}], not {list(shape)}")
    return rotary_dim


@rotary_embedding.problem_of
def _(positions, query, key, head_size, cos_sin_cache, is_neox_style=True) -> RotaryProblem:
    rotary_dim, table_dtype = (
        cos_sin_cache.shape[-1],
        None if cos_sin_cache.dtype == query.dtype else cos_sin_cache.dtype,
    )
    return RotaryProblem(query.device.type, query.dtype, head_size, rotary_dim, is_neox_style, table_dtype)


@rotary_embedding.cost
def _(positions, query, key, head_size, cos_sin_cache, is_neox_style=True) -> Cost:
    rotary_dim = cos_sin_cache.shape[-1]
    elements = query.numel() + (0 if key is None else key.numel())
    rotated = elements * rotary_dim // head_size
    moved = 2 * rotated * query.itemsize
    rows = positions.numel() * rotary_dim * cos_sin_cache.itemsize
    return Cost(bytes=moved + rows + positions.nbytes, flops=3 * rotated)


def table(rows: int, rotary_dim: int, dtype: torch.dtype, device: str, magnitude: float = 1.0) -> torch.Tensor:
    """A cos_sin_cache as vLLM's `RotaryEmbedding` makes it."""
    frequencies = 10000 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.outer(torch.arange(rows).float(), frequencies)
    return (magnitude * torch.cat((angles.cos(), angles.sin()), dim=-1)).to(device=device, dtype=dtype)


@rotary_embedding.sample_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(
        name: str, *, tokens=5, heads=4, kv_heads=2, size=64, rotary=None, neox=True, key=True, index=torch.int64,
        table_dtype=dtype, magnitude=1.0, std=1.0, at=None, layout=lambda *tensors: tensors,
    ) -> Sample:  # fmt: skip
        def make():
            rng = _samples.generator(name)
            rows = table(128, rotary or size, table_dtype, device, magnitude)
            positions = torch.randint(128, (tokens,), generator=rng) if at is None else torch.tensor(at)
            unused = torch.ones(128, dtype=torch.bool).index_fill(0, positions, False)
            rows[unused.to(device)] = math.nan
            q, k = layout(*(_samples.normal((tokens, n * size), dtype, device, rng, std) for n in (heads, kv_heads)))
            return (positions.to(device, index), q, k if key else None, size, rows, neox), {}

        return Sample(name, make, scale=std * magnitude)

    def split_heads(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.unflatten(1, (-1, 64)) for tensor in tensors)

    def heads_before_tokens(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in split_heads(*tensors))

    yield sample("zero tokens", tokens=0)
    yield sample("one token", tokens=1)
    yield sample("one head", heads=1, kv_heads=1)
    for neox, style in ((True, "NeoX"), (False, "GPT-J")):
        yield sample(f"{style}", neox=neox)
        yield sample(f"{style}, partial", size=96, rotary=24, neox=neox)
        yield sample(f"{style}, half of each head", size=128, rotary=64, neox=neox)
        yield sample(f"{style}, one pair", size=16, rotary=2, neox=neox)
        yield sample(f"{style}, odd head size", size=5, rotary=4, neox=neox)
        yield sample(f"{style}, slices of a fused projection", neox=neox, layout=_samples.side_by_side)
        yield sample(f"{style}, heads as a dimension", neox=neox, layout=split_heads)
        yield sample(f"{style}, heads before tokens in memory", neox=neox, layout=heads_before_tokens)
    yield sample("no key", key=False)
    yield sample("int32 positions", index=torch.int32)
    yield sample("the ends of the table, repeated and unordered", at=[127, 0, 127, 1, 0])
    yield sample("fp32 table", table_dtype=torch.float32)
    yield sample("YaRN's magnitude", magnitude=1.4)
    yield sample("large values", std=100.0)
    yield sample("Qwen3-8B heads", tokens=2, heads=32, kv_heads=8, size=128)


@rotary_embedding.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name: str, *, positions=(3,), query=(3, 128), key=(3, 64), width=64) -> Sample:
        def make():
            query_and_key = (torch.ones(shape, dtype=dtype, device=device) for shape in (query, key))
            rows = torch.ones(8, width, dtype=dtype, device=device)
            return (torch.zeros(positions, dtype=torch.int64, device=device), *query_and_key, 64, rows), {}

        return Sample(name, make)

    yield sample("an odd rotary_dim", width=63)
    yield sample("rotary_dim over head_size", width=128)
    yield sample("one position for three tokens", positions=(1,))
    yield sample("positions of three axes", positions=(3, 3))
    yield sample("a query of half a head", query=(3, 96))
    yield sample("heads of another size", query=(3, 2, 128))
    yield sample("a key of other tokens", key=(1, 64))
    yield sample("a key of half a head", key=(3, 32))


@rotary_embedding.bench_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(num_tokens: int) -> Sample:
        def make():
            rng = _samples.generator(str(num_tokens), device)
            q, k, _ = _samples.side_by_side(
                *(_samples.normal((num_tokens, heads * 128), dtype, device, rng) for heads in (32, 8, 8)), padding=0
            )
            positions = torch.randint(4096, (num_tokens,), generator=rng, device=device)
            return (positions, q, k, 128, table(4096, 128, dtype, device)), {}

        return Sample(f"T{num_tokens} H32/8 D128", make)

    for num_tokens in _samples.bench_tokens(device):
        yield sample(num_tokens)


def _inputs(device: str, dtype: torch.dtype, neox: bool) -> tuple[torch.Tensor, ...]:
    """Positions, query, key, and a table in fp32, of heads of 64."""
    rng = _samples.generator(f"property {neox}")
    q, k = (_samples.normal((6, heads * 64), dtype, device, rng) for heads in (4, 2))
    return torch.randint(128, (6,), generator=rng).to(device), q, k, table(128, 64, torch.float32, device)


@rotary_embedding.property_
def position_zero_is_the_identity(run, device: str, dtype: torch.dtype) -> None:
    """Position 0 changes no bit."""
    for neox in (True, False):
        positions, q, k, rows = _inputs(device, dtype, neox)
        before = q.clone(), k.clone()
        run(torch.zeros_like(positions), q, k, 64, rows, neox)
        for after, given in zip((q, k), before, strict=True):
            _properties.equal("position 0 rotates", after, given)


@rotary_embedding.property_
def rotation_preserves_norms(run, device: str, dtype: torch.dtype) -> None:
    """The norm of each head stays the same, up to the rounding to the dtype and that of the norm itself."""
    slack = 2 * torch.finfo(dtype).eps
    for neox in (True, False):
        positions, q, k, rows = _inputs(device, dtype, neox)
        before = q.float().view(6, 4, 64).norm(dim=-1)
        run(positions, q, k, 64, rows, neox)
        after = q.float().view(6, 4, 64).norm(dim=-1)
        _properties.equal("a rotation changes the length of a head", after, before, rtol=slack)


@rotary_embedding.property_
def only_the_distance_matters(run, device: str, dtype: torch.dtype) -> None:
    """The product of a query and a key stays the same if both are shifted by the same number of positions."""
    slack = max(1e-4, 8 * torch.finfo(dtype).eps)
    for neox in (True, False):
        _, q, _, rows = _inputs(device, dtype, neox)
        products = []
        for shift in (0, 20):
            query, key = q[:1].clone(), q[1:2].clone()
            run(torch.tensor([7 + shift], device=device), query, None, 64, rows, neox)
            run(torch.tensor([3 + shift], device=device), key, None, 64, rows, neox)
            products.append((query.float() * key.float()).view(4, 64).sum(dim=-1))
        _properties.equal("a shift of all positions changes the products", *products, rtol=slack, atol=slack)


@rotary_embedding.property_
def tokens_are_independent(run, device: str, dtype: torch.dtype) -> None:
    """NaN in other tokens changes no bit of a token."""
    for neox in (True, False):
        positions, q, k, rows = _inputs(device, dtype, neox)
        alone, among_nan = q.clone(), q.clone()
        among_nan[1::2] = math.nan
        run(positions, alone, k.clone(), 64, rows, neox)
        run(positions, among_nan, k, 64, rows, neox)
        _properties.equal("NaN in one token changes another", among_nan[::2], alone[::2])
