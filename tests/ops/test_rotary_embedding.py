import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_opset import ops
from vllm_opset.kernel import kernels_of
from vllm_opset.ops import _samples
from vllm_opset.ops.rope.rotary_embedding import table

RNG = _samples.generator("test_rotary_embedding")
ROPES = {
    "default": {"rope_type": "default"},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.25},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "ntk": {"rope_type": "ntk", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic alpha": {"rope_type": "dynamic", "alpha": 8.0},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}  # fmt: skip
SECTIONS = {
    "sections": {"mrope_section": [8, 12, 12]},
    "interleaved sections": {"mrope_section": [12, 10, 10], "mrope_interleaved": True},
    "sections, yarn": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mrope_section": [8, 12, 12]
    },
}  # fmt: skip


def vllms_rope(parameters: dict, neox: bool, dtype: torch.dtype) -> torch.nn.Module:
    from vllm.model_executor.layers.rotary_embedding import get_rope

    parameters = {"rope_type": "default", "rope_theta": 10000.0} | parameters
    return get_rope(64, max_position=128, is_neox_style=neox, rope_parameters=parameters, dtype=dtype)


def query_and_key(tokens: int, dtype: torch.dtype, heads=(4, 2), size=64) -> tuple[torch.Tensor, torch.Tensor]:
    return _samples.side_by_side(*(_samples.normal((tokens, n * size), dtype, "cpu", RNG) for n in heads))


@pytest.mark.parametrize("neox", [True, False], ids=["NeoX", "GPT-J"])
@pytest.mark.parametrize("name", ROPES)
def test_agrees_with_vllm(name, neox, dtype, agree, vllm_layers):
    layer = vllms_rope(ROPES[name], neox, dtype)
    positions = torch.tensor([0, 1, 5, 127, 64])
    query, key = query_and_key(5, dtype)
    theirs = layer.forward_native(positions, query, key)
    ops.rotary_embedding(positions, query, key, 64, layer.cos_sin_cache, neox)
    for one, other in zip((query, key), theirs, strict=True):
        agree(one, other, scale=4)


@pytest.mark.parametrize("name", SECTIONS)
def test_multimodal_positions_are_a_table_with_a_row_for_each_token(name, dtype, agree, vllm_layers):
    """As the module says, a layer takes each pair's cosine and sine from the row of that pair's section."""
    layer = vllms_rope(SECTIONS[name], True, dtype)
    positions = torch.randint(128, (3, 6), generator=RNG)
    query, key = query_and_key(6, dtype)
    theirs = layer.forward_native(positions, query.contiguous(), key.contiguous())
    time, height, width = layer.mrope_section
    if layer.mrope_interleaved:
        axis = torch.tensor([i % 3 if i < 3 * (0, height, width)[i % 3] else 0 for i in range(32)])
    else:
        axis = torch.tensor([0] * time + [1] * height + [2] * width)
    rows = layer.cos_sin_cache[positions[axis.repeat(2)].T, torch.arange(64)]
    ops.rotary_embedding(torch.arange(6), query, key, 64, rows)
    for one, other in zip((query, key), theirs, strict=True):
        agree(one, other, scale=4)


@pytest.mark.parametrize("long", [True, False], ids=["long", "short"])
def test_phi3s_two_tables_are_parts_of_one(long, agree):
    from vllm.model_executor.layers.rotary_embedding import Phi3LongRoPEScaledRotaryEmbedding

    # Its constructor needs a model. Its forward reads only these attributes.
    layer = Phi3LongRoPEScaledRotaryEmbedding.__new__(Phi3LongRoPEScaledRotaryEmbedding)
    torch.nn.Module.__init__(layer)
    layer.head_size, layer.rotary_dim, layer.use_long_rope, layer.original_max_position_embeddings = 64, 48, long, 40
    short, extended = table(40, 48, torch.float32, "cpu", 1.1), table(99, 48, torch.float32, "cpu", 1.3)
    layer.long_short_cos_sin_cache = torch.cat((short, extended))
    query, key = query_and_key(4, torch.float32)
    positions = torch.tensor([0, 39, 7, 7])
    theirs = layer(positions, query, key)
    ops.rotary_embedding(positions, query, key, 64, extended if long else short)
    for one, other in zip((query, key), theirs, strict=True):
        agree(one, other, scale=4)


@pytest.mark.parametrize("neox", [True, False], ids=["NeoX", "GPT-J"])
@pytest.mark.parametrize("trailing", [True, False], ids=["trailing slice", "leading slice"])
def test_deepseeks_slices(trailing, neox, dtype, agree, vllm_layers):
    yarn = {"rope_type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_dim": 32}
    layer = vllms_rope(yarn | {"is_deepseek_v4": trailing}, neox, dtype)
    query, key = (x.unflatten(1, (-1, 64)) for x in query_and_key(4, dtype))
    positions = torch.tensor([0, 255, 7, 7])
    theirs = layer.forward_native(positions, query, key)
    if trailing:
        ops.rotary_embedding(positions, query[..., 32:], key[..., 32:], 32, layer.cos_sin_cache, neox)
    else:
        ops.rotary_embedding(positions, query, key, 64, layer.cos_sin_cache, neox)
    agree(query, theirs[0], scale=8)
    agree(key, theirs[1], scale=8)


@pytest.mark.parametrize("neox", [True, False], ids=["NeoX", "GPT-J"])
def test_is_a_multiplication_by_a_complex_number(neox):
    positions = torch.tensor([3, 0, 9])
    angles = torch.outer(torch.arange(10, dtype=torch.float64), torch.tensor([1.0, 0.1, 0.01]))
    query = torch.randn(3, 2, 8, dtype=torch.float64, generator=RNG)
    rotated = query.clone()
    ops.rotary_embedding(positions, rotated, None, 8, torch.cat((angles.cos(), angles.sin()), 1), neox)

    def as_complex(x: torch.Tensor) -> torch.Tensor:
        pairs = x[..., :6].unflatten(-1, (2, 3)).mT if neox else x[..., :6].unflatten(-1, (3, 2))
        return torch.view_as_complex(pairs.contiguous())

    turn = torch.polar(torch.ones_like(angles), angles)[positions].unsqueeze(1)
    torch.testing.assert_close(as_complex(rotated), as_complex(query) * turn)
    assert torch.equal(rotated[..., 6:], query[..., 6:])


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_position_beyond_the_table_raises_on_a_cpu(name):
    with pytest.raises(IndexError):
        kernels_of("rotary_embedding")[name].run(torch.tensor([4]), torch.ones(1, 8), None, 8, torch.ones(4, 8))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rows": 7}, "must be even and at most head_size=8 wide, not 7"),
        ({"rows": 16}, "must be even and at most head_size=8 wide, not 16"),
        ({"positions": (1,)}, r"3 tokens need positions \[3\], not \[1\]"),
        ({"positions": (3, 3)}, r"3 tokens need positions \[3\], not \[3, 3\]"),
        ({"query": (3, 12)}, r"must be \[T, H \* 8\] or \[T, H, 8\], not \[3, 12\]"),
        ({"query": (3, 2, 16)}, r"must be \[T, H \* 8\] or \[T, H, 8\], not \[3, 2, 16\]"),
        ({"query": (3,)}, "3 tokens need positions|must be"),
        ({"key": (2, 8)}, r"2 tokens need positions \[2\], not \[3\]"),
    ],
    ids=str,
)
def test_refuses_shapes_that_disagree(arguments, words):
    shapes = {"positions": (3,), "query": (3, 16), "key": (3, 8), "rows": 8} | arguments
    positions = torch.zeros(shapes["positions"], dtype=torch.int64)
    query, key, rows = torch.ones(shapes["query"]), torch.ones(shapes["key"]), torch.ones(4, shapes["rows"])
    with pytest.raises(ValueError, match=words):
        ops.rotary_embedding(positions, query, key, 8, rows)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@given(data=st.data())
@settings(deadline=None, max_examples=30, derandomize=True)
def test_any_layout_gives_the_same(name, data):
    """Covers [T, H * D], [T, H, D], and heads before tokens, as parts of wider tensors."""
    run = kernels_of("rotary_embedding")[name].run
    tokens, heads, pairs = (data.draw(st.integers(low, 4)) for low in (0, 1, 1))
    size = 2 * pairs + data.draw(st.integers(0, 3))
    neox = data.draw(st.booleans())
    rng = _samples.generator("layouts")
    wide = torch.randn(heads + 1, tokens, size + 2, generator=rng)
    by_head = wide[1:, :, 1:-1].transpose(0, 1)
    flat = torch.cat([torch.zeros(tokens, 3), by_head.flatten(1)], dim=1)[:, 3:]
    dense = by_head.clone(memory_format=torch.contiguous_format)
    rows = torch.randn(5, 2 * pairs, generator=rng)
    positions = torch.randint(5, (tokens,), generator=rng)
    expected = dense.clone()
    ops.rotary_embedding(positions, expected, None, size, rows, neox)
    for x in (by_head, flat, dense):
        assert run(positions, x, None, size, rows, neox) is None
        torch.testing.assert_close(x.reshape(expected.shape), expected)
