"""How the CPU kernel of paged_attention finds the rows of a cache, and cuts a batch into chunks."""

import pytest
import torch

from vllm_opset import ops
from vllm_opset.kernel import kernels_of
from vllm_opset.kernels.cpu import _paged_plan
from vllm_opset.kernels.cpu._paged_plan import Geometry, geometry, make_plan
from vllm_opset.ops.attention._paged_inputs import LAYOUTS, PagedCase, poisoned_cache
from vllm_opset.ops.attention.paged_batch import PagedBatch, window_sides


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_a_cache(layout):
    kv_cache = poisoned_cache(layout, 5, 3, 4, torch.empty(6))
    kv_cache.copy_(torch.arange(5 * 3 * 4 * 6).view(5, 3, 4, 6))
    cache = geometry(kv_cache.shape, kv_cache.stride())
    block, head, slot = torch.meshgrid(torch.arange(5), torch.arange(3), torch.arange(4), indexing="ij")
    index = block * cache.block_step + head * cache.head_step + slot * cache.slot_step
    assert torch.equal(cache.rows_of(kv_cache)[index], kv_cache)


def test_rows_of_a_large_cache_are_counted_in_64_bits():
    cache = Geometry(
        num_rows=2**40, row_stride=8, num_kv_heads=1, block_size=4, block_step=2**30, head_step=2**20, slot_step=2**16
    )
    block_table, request = torch.tensor([[3, 7]], dtype=torch.int32), torch.tensor([0])
    tokens = _paged_plan._tokens(block_table, request, torch.tensor([[2, 5]]), cache)
    assert tokens.tolist() == [[[3 * 2**30 + 2 * 2**16, 7 * 2**30 + 2**16]]]


def chunks_of(case: PagedCase, window=None, least_tokens=1) -> list:
    (_, kv_cache, batch, _), _ = case.make("plan", "cpu", torch.float32)
    cache = geometry(kv_cache.shape, kv_cache.stride())
    return make_plan(batch, *window_sides(window, case.causal), cache, 4 * 2 * 2 * 64, least_tokens).chunks


def test_decoding_requests_are_attended_in_one_go():
    (chunk,) = chunks_of(PagedCase(tuple((1, 5 + i) for i in range(40))))
    assert chunk.num_blocks == 40 and chunk.num_keys == 44 and chunk.rows == slice(0, 40)
    (chunk,) = chunks_of(PagedCase(((1, 9),) * 40))
    assert chunk.bias is None
    decode, *prompts = chunks_of(PagedCase(((20, 20), (1, 30), (33, 40), (1, 9))))
    assert decode.num_blocks == 2 and decode.rows.tolist() == [20, 54]
    assert [chunk.rows for chunk in prompts] == [slice(0, 20), slice(21, 54)]


def test_a_batch_without_requests_has_no_chunks():
    none = torch.empty(0, dtype=torch.int32)
    batch = PagedBatch(torch.zeros(1, dtype=torch.int32), none, none.view(0, 1), max_query_len=1, max_seq_len=1)
    plan = make_plan(batch, None, 0, geometry((1, 1, 16, 128), (2048, 2048, 128, 1)), 512)
    assert not plan.chunks and not plan.rows_without_keys


def test_requests_of_fewer_tokens_are_left_out():
    chunks = chunks_of(PagedCase(((1, 30), (7, 40), (6, 6), (0, 0), (300, 300), (1, 9))), least_tokens=7)
    assert [chunk.rows for chunk in chunks] == [slice(1, 8), slice(270, 314), slice(14, 270)]
    assert not chunks_of(PagedCase(((1, 9),) * 3), least_tokens=7)


def test_only_what_a_window_holds_is_gathered():
    (chunk,) = chunks_of(PagedCase(((1, 900), (1, 700))), window=32)
    assert chunk.num_keys == 32 and chunk.bias is None
    assert [chunk.num_keys for chunk in chunks_of(PagedCase(((600, 600),)), window=32)] == [88 + 31, 256 + 31, 256]


def test_a_long_sequence_is_attended_by_heads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    first, second = chunks_of(PagedCase(((1, 5000),)))
    assert [first.heads, second.heads] == [slice(0, 1), slice(1, 2)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    (chunk,) = chunks_of(PagedCase(((1, 5000),)))
    assert chunk.heads == slice(0, 2), "a thread has nothing to do"


def test_what_is_gathered_at_a_time_is_bounded():
    chunks = chunks_of(PagedCase(tuple((1, 100 * (1 + i % 20)) for i in range(40))))
    sizes = [chunk.num_blocks * chunk.num_keys * 4 * 2 * 2 * 64 for chunk in chunks]
    assert 1 < len(chunks) < 40 and max(sizes) <= _paged_plan.CHUNK_BYTES
    assert sorted(row for chunk in chunks for row in torch.arange(40)[chunk.rows].tolist()) == list(range(40))


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"causal": False}, {"soft_cap": 1.5, "sinks": True}], ids=str)
def test_attention_agrees_however_little_is_gathered_at_a_time(options, monkeypatch):
    """All requests have the same number of queries, so that they form a group, over contexts of several lengths."""
    case = PagedCase(((7, 40), (7, 7), (7, 90), (7, 20), (1, 9), (1, 30)), **options)
    (query, kv_cache, batch, out), arguments = case.make("little", "cpu", torch.float32)
    want = out.clone()
    ops.paged_attention(query, kv_cache, batch, want, **arguments)
    monkeypatch.setattr(_paged_plan, "CHUNK_BYTES", 50 * 4 * 2 * 2 * 64)  # keys and values of 50 tokens
    monkeypatch.setattr(_paged_plan, "QUERY_BLOCK", 14)
    kernels_of("paged_attention")["cpu"].run(query, kv_cache, batch, out, **arguments)
    torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)
