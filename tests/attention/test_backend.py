"""The attention backend as vLLM uses it: its properties, and a layer's cache written and attended."""

import dataclasses
import importlib.util
from types import SimpleNamespace

import pytest
import torch

from vllm_opset import ops, selection
from vllm_opset.attention import BACKEND
from vllm_opset.ops.attention.paged_batch import packed_cache
from vllm_opset.unsupported import Refusal

pytestmark = pytest.mark.window

NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 20, 4, 4, 2, 16
SCALE = HEAD_SIZE**-0.5


@pytest.fixture(scope="module", autouse=True)
def plugin():
    from vllm.plugins import load_general_plugins

    load_general_plugins()


@pytest.fixture(autouse=True)
def fresh():
    selection.configure()
    selection.forget()


def impl(**arguments):
    from vllm_opset.attention.impl import OpsetAttentionImpl

    layer = OpsetAttentionImpl(NUM_HEADS, HEAD_SIZE, SCALE, NUM_KV_HEADS, **arguments)
    layer.choose_kernels(torch.float32, BLOCK_SIZE)
    return layer


def empty_cache() -> torch.Tensor:
    return torch.full((NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE), torch.nan)


def metadata(seq_lens: list[int]):
    """A step in which all tokens of these requests are new, on pages in a random order."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    pages = torch.randperm(NUM_BLOCKS - 1).int() + 1
    width = -(-max(seq_lens) // BLOCK_SIZE)
    block_table = torch.zeros(len(seq_lens), width, dtype=torch.int32)
    slots, used = [], 0
    for row, seq_len in enumerate(seq_lens):
        needed = -(-seq_len // BLOCK_SIZE)
        block_table[row, :needed] = pages[used : used + needed]
        used += needed
        position = torch.arange(seq_len)
        slots.append(block_table[row, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE)
    starts = torch.tensor([0, *seq_lens]).cumsum(0).int()
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(seq_lens),
        num_actual_tokens=sum(seq_lens),
        max_query_len=max(seq_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=block_table,
        slot_mapping=torch.cat(slots),
        causal=True,
    )


def builder(spec, *layers, builder_cls=None, speculative_config=None):
    """A metadata builder for these layers, as the model runner makes it."""
    from vllm_opset.attention.metadata import OpsetMetadataBuilder

    context = {f"layer {i}": SimpleNamespace(impl=layer) for i, layer in enumerate(layers)}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context),
        model_config=None,
        speculative_config=speculative_config,
    )
    return (builder_cls or OpsetMetadataBuilder)(spec, list(context), config, torch.device("cpu"))


def specs():
    from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec, FullAttentionSpec

    known = {
        "block_size": BLOCK_SIZE,
        "num_kv_heads": NUM_KV_HEADS,
        "head_size": HEAD_SIZE,
        "dtype": torch.float32,
    }
    return FullAttentionSpec(**known), EncoderOnlyAttentionSpec(**known)


def tensors(num_tokens: int) -> tuple[torch.Tensor, ...]:
    """query, key, value, output"""
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
    return tuple(torch.randn(num_tokens, n, HEAD_SIZE) for n in heads)


def dense(query, key, value, seq_lens, *, window=None, causal=True, soft_cap=0.0, slopes=None, sinks=None):
    """Attention of each request without a cache."""
    outputs = []
    repeat = NUM_HEADS // NUM_KV_HEADS
    for q, k, v in zip(*(x.split(seq_lens) for x in (query, key, value)), strict=True):
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * SCALE
        scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
        distance = torch.arange(len(k))[None] - torch.arange(len(q))[:, None]
        if slopes is not None:
            scores = scores + torch.tensor(slopes)[:, None, None] * distance
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if causal:
            hidden |= distance > 0
        if window is not None:
            hidden |= distance.abs() >= window
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), dim=-1)
        weights = scores.softmax(-1)[..., : len(k)]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v.double()))
    return torch.cat(outputs).float()


CASES = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 3}, {"window": 3}),
    "soft cap": ({"logits_soft_cap": 0.5}, {"soft_cap": 0.5}),
    "ALiBi": ({"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]}, {"slopes": [0.5, 0.25, 0.125, 0.0625]}),
    "sinks": ({"sinks": torch.tensor([0.5, -0.5, 1.0, 0.0])}, {"sinks": torch.tensor([0.5, -0.5, 1.0, 0.0])}),
}


def attended(layer, query, kv_cache, step, output):
    """The problem of the layer's call, which selection must know before the first step."""
    return ops.paged_attention.problem_for(query, kv_cache, step.batch, output, **layer._attend.keywords)


def chosen(op: str) -> list:
    return [choice.problem for choice in selection.choices() if choice.op == op]


@pytest.mark.parametrize("name", CASES)
def test_a_layer_writes_its_cache_and_attends(name):
    arguments, expected = CASES[name]
    layer, seq_lens = impl(**arguments), [1, 6, 9]
    query, key, value, output = tensors(sum(seq_lens))
    step = builder(specs()[0], layer).build(0, metadata(seq_lens))
    cache = empty_cache()
    layer.forward(None, query, key, value, cache, step, output)
    torch.testing.assert_close(output, dense(query, key, value, seq_lens, **expected), rtol=1e-5, atol=1e-5)
    assert chosen("paged_attention") == [layer.problem] == [attended(layer, query, cache, step, output)]
    assert chosen("reshape_and_cache") == [ops.reshape_and_cache.problem_for(key, value, cache, step.slot_mapping)]


@pytest.mark.parametrize(("window", "kv_cache_dtype"), [(None, "auto"), (3, "auto"), (3, "fp8")])
def test_an_encoder_attends_without_a_cache(window, kv_cache_dtype):
    layer = impl(attn_type="encoder_only", sliding_window=window, kv_cache_dtype=kv_cache_dtype)
    spec, seq_lens = specs()[1], [1, 6, 40]
    if kv_cache_dtype == "fp8":
        spec = dataclasses.replace(spec, dtype=torch.uint8)  # as vLLM's model runners describe it
    query, key, value, output = tensors(sum(seq_lens))
    step = builder(spec, layer).build(0, metadata(seq_lens))
    layer.forward(None, query, key, value, torch.tensor([]), step, output)
    expected = dense(query, key, value, seq_lens, causal=False, window=window)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert layer.problem == attended(layer, query, packed_cache(key, value), step, output)
    assert layer.problem in chosen("paged_attention")


def test_a_prompt_of_a_prefix_lm_sees_itself_whole():
    """Kernels for an NPU do not support that. Its problem must say so, or one of them is chosen and raises."""
    from vllm.model_executor.layers.attention.encoder_only_attention import create_encoder_only_attention_backend

    from vllm_opset.attention.backend import OpsetAttentionBackend

    layer, seq_lens = impl(), [1, 6, 9]
    query, key, value, output = tensors(sum(seq_lens))
    spec = dataclasses.replace(specs()[0], non_causal=True)
    builder_cls = create_encoder_only_attention_backend(OpsetAttentionBackend).get_builder_cls()
    step, cache = builder(spec, layer, builder_cls=builder_cls).build(0, metadata(seq_lens)), empty_cache()
    layer.forward(None, query, key, value, cache, step, output)
    torch.testing.assert_close(output, dense(query, key, value, seq_lens, causal=False), rtol=1e-5, atol=1e-5)
    assert layer.problem == attended(layer, query, cache, step, output)
    assert not layer.problem.causal


def test_attention_in_chunks_that_look_back_is_refused():
    impl(chunk_lookback=-1)  # vLLM's value for a layer without chunks
    with pytest.raises(Refusal, match=r"in chunks that look back \(chunk_lookback=1\): choose another model"):
        impl(chunk_lookback=1)


def test_layers_that_share_a_cache_do_not_write_it():
    owner, sharer = impl(), impl(kv_sharing_target_layer_name="layer 0")
    query, key, value, output = tensors(6)
    step, cache = builder(specs()[0], owner, sharer).build(0, metadata([6])), empty_cache()
    owner.forward(None, query, key, value, cache, step, output)
    expected, before = output.clone(), cache.clone()
    for own in ((torch.randn_like(key), torch.randn_like(value)), (None, None)):
        sharer.forward(None, query, *own, cache, step, output.zero_())
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(cache, before, equal_nan=True)


def test_an_fp8_cache_is_scaled_by_what_vllm_keeps_with_the_layer():
    layer = SimpleNamespace(_k_scale=torch.tensor([0.25]), _v_scale=torch.tensor([4.0]))
    scaled, plain = impl(kv_cache_dtype="fp8"), impl()
    query, key, value, output = tensors(6)
    cache = torch.zeros(empty_cache().shape, dtype=torch.uint8)  # as vLLM allocates it
    spec = dataclasses.replace(specs()[0], dtype=cache.dtype)
    step = builder(spec, scaled).build(0, metadata([6]))
    scaled.forward(layer, query, key, value, cache, step, output)
    as_fp8 = cache.view(torch.float8_e4m3fn)
    assert scaled.problem == attended(scaled, query, as_fp8, step, output)
    assert scaled.problem in chosen("paged_attention")
    assert ops.reshape_and_cache.problem_for(key, value, as_fp8, step.slot_mapping) in chosen("reshape_and_cache")
    stored = [(x / scale).to(torch.float8_e4m3fn).float() * scale for x, scale in ((key, 0.25), (value, 4.0))]
    step = builder(specs()[0], plain).build(0, metadata([6]))
    expected = plain.forward(None, query, *stored, empty_cache(), step, torch.empty_like(output))
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_a_model_that_drafts_writes_keys_and_values_as_they_are(kv_cache_dtype):
    """Also where the layer's own steps rotate the keys while they write them."""
    layer = SimpleNamespace(_k_scale=torch.tensor([0.25]), _v_scale=torch.tensor([4.0]))
    plain, fused = impl(kv_cache_dtype=kv_cache_dtype), impl(kv_cache_dtype=kv_cache_dtype)
    fused.deferred = SimpleNamespace(cache_write=lambda **problem: lambda *tensors, **scales: pytest.fail("not this"))
    query, key, value, output = tensors(6)
    dtype = torch.uint8 if kv_cache_dtype == "fp8" else torch.float32
    expected, cache = (torch.zeros(empty_cache().shape, dtype=dtype) for _ in range(2))
    step = builder(dataclasses.replace(specs()[0], dtype=dtype), plain, fused).build(0, metadata([6]))
    plain.forward(layer, query, key, value, expected, step, output)
    fused.do_kv_cache_update(layer, key, value, cache, step.slot_mapping)
    assert expected.any() and torch.equal(cache, expected)


def test_nothing_is_attended_while_vllm_measures():
    query, key, value, output = tensors(6)
    assert not impl().forward(None, query, key, value, torch.tensor([]), None, output).any()


def test_lengths_are_given_from_the_host_only_where_they_are_exact():
    from vllm_opset.attention.metadata import OpsetMetadataBuilder

    class DerivedByVllm(OpsetMetadataBuilder):
        pass

    step = metadata([1, 6])
    step.seq_lens_cpu_upper_bound = step.seq_lens + 40
    batch = builder(specs()[0], impl()).build(0, step).batch
    assert batch.query_start_loc_cpu is step.query_start_loc_cpu and batch.seq_lens_cpu is step.seq_lens_cpu_upper_bound
    for arguments in ({"speculative_config": object()}, {"builder_cls": DerivedByVllm}):
        batch = builder(specs()[0], impl(), **arguments).build(0, step).batch
        assert batch.query_start_loc_cpu is None and batch.seq_lens_cpu is None
    step.seq_lens_cpu_upper_bound = None
    assert builder(specs()[0], impl()).build(0, step).batch.seq_lens_cpu is None


def test_metadata_follows_lengths_that_vllm_changes_in_place_while_a_model_drafts():
    step = metadata([1, 6])
    made = builder(specs()[0], impl())
    found = made.build(0, step)
    assert found.batch.once(_lengths) == [1, 6]
    step.seq_lens += 1
    assert found.batch.once(_lengths) == [1, 6]
    made.update_draft_decode_metadata(found)
    assert found.batch.once(_lengths) == [2, 7]


def _lengths(batch) -> list[int]:
    return batch.seq_lens.tolist()


def test_only_metadata_of_opsets_own_builder_can_follow():
    """Builders that vLLM derives copy lengths to buffers of their own when they build metadata."""

    class DerivedByVllm(type(builder(specs()[0], impl()))):
        pass

    assert builder(specs()[0], impl()).supports_draft_decode_metadata_update
    assert not builder(specs()[0], impl(), builder_cls=DerivedByVllm).supports_draft_decode_metadata_update


def test_layers_that_attend_in_both_directions_are_told_so():
    for causal in (True, False):
        step = dataclasses.replace(metadata([1, 6]), causal=causal)
        assert builder(specs()[0], impl()).build(0, step).batch.causal is causal


def test_chunked_local_attention_tells_kernels_lengths_that_they_can_count_with():
    """vLLM derives its builder from ours, and cuts requests into chunks with NumPy."""
    from vllm.model_executor.layers.attention import chunked_local_attention
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    from vllm_opset.attention.backend import OpsetAttentionBackend

    derived = chunked_local_attention.create_chunked_local_attention_backend(OpsetAttentionBackend, 8)
    spec = ChunkedLocalAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=NUM_KV_HEADS, head_size=HEAD_SIZE, dtype=torch.float32,
        attention_chunk_size=8,
    )  # fmt: skip
    step = metadata([3, 20])
    step.seq_lens_cpu_upper_bound = step.seq_lens
    batch = builder(spec, impl(), builder_cls=derived.get_builder_cls()).build(0, step).batch
    assert batch.seq_lens.tolist() == [3, 8, 8, 4]
    assert (type(batch.max_query_len), batch.max_query_len) == (int, 8) and type(batch.max_seq_len) is int


def test_the_kernel_is_the_chosen_one():
    selection.configure({"opset": {"kernels": {"paged_attention": "reference"}}})
    layer = impl()
    (choice,) = [choice for choice in selection.choices() if choice.op == "paged_attention"]
    assert choice.kernel.name == "reference" and layer._attend.func is choice.run


def test_the_layout_of_both_interfaces():
    """Until 0.28 the backend gives the shape; since 0.29 vLLM does. Both shapes are the same."""
    from vllm_opset.attention.backend import OpsetAttentionBackend as Backend

    assert Backend.get_kv_cache_shape(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE) == empty_cache().shape
    assert sorted(Backend.get_kv_cache_stride_order()) == [0, 1, 2, 3]
    assert sorted(Backend.get_kv_cache_stride_order(include_num_layers_dimension=True)) == [0, 1, 2, 3, 4]
    if importlib.util.find_spec("vllm.v1.kv_cache_layout"):
        from vllm.v1.kv_cache_layout import KVCacheLayout

        layouts = Backend.supported_kv_cache_layouts()
        assert layouts[0] is KVCacheLayout.LBHNC and set(layouts) == set(KVCacheLayout)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"attn_type": "encoder_decoder"}, "encoder_decoder"),
        ({"use_mla": True}, "MLA"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
        ({"use_non_causal": True}, "non-causal"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_reason(wanted, reason):
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from vllm_opset.platform import refusals

    plain = {"head_size": HEAD_SIZE, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": None}
    refusals.check_attention(
        BACKEND, None, AttentionSelectorConfig(**plain, has_sink=True, has_sliding_window=True), "here"
    )
    with pytest.raises(refusals.Refusal, match=reason):
        refusals.check_attention(BACKEND, None, AttentionSelectorConfig(**plain | wanted), "here")


def test_vllm_finds_it_by_name():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_opset.attention.backend import OpsetAttentionBackend

    assert AttentionBackendEnum.CUSTOM.get_class() is OpsetAttentionBackend
    assert OpsetAttentionBackend.get_name() == "CUSTOM"
