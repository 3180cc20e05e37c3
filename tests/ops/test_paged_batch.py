"""The description of a batch for paged_attention: windows, heads, the tensors of a step. Mismatches are refused."""

import pytest
import torch

from vllm_opset.ops.attention.paged_attention import PagedAttentionProblem
from vllm_opset.ops.attention.paged_batch import PagedBatch, window_sides


@pytest.mark.parametrize(
    ("window", "causal", "sides"),
    [
        (None, True, (None, 0)),
        (None, False, (None, None)),
        (1, True, (0, 0)),
        (9, True, (8, 0)),
        (9, False, (8, 0)),
        ((8, 0), False, (8, 0)),
        ((8, 3), False, (8, 3)),
        ((8, 3), True, (8, 0)),
        ((-1, 3), False, (None, 3)),
        ((8, -1), False, (8, None)),
        ((8, -1), True, (8, 0)),
        ((-1, -1), True, (None, 0)),
    ],
)
def test_sides_of_a_window(window, causal, sides):
    assert window_sides(window, causal) == sides


@pytest.mark.parametrize("window", [0, -1, (-2, 0), (0, -2)])
def test_a_window_of_no_keys_is_refused(window):
    with pytest.raises(ValueError, match="holds no key"):
        window_sides(window, True)
    with pytest.raises(ValueError, match="holds no key"):
        PagedAttentionProblem("cpu", torch.float32, torch.float32, 4, 2, 64, 16, window=window)


def test_heads_that_cannot_be_shared_are_refused():
    with pytest.raises(ValueError, match="3 query heads cannot share 2 KV heads evenly"):
        PagedAttentionProblem("cpu", torch.float32, torch.float32, 3, 2, 64, 16)


def batch_of(**changes) -> PagedBatch:
    tensors = {"query_start_loc": [0, 1, 3], "seq_lens": [4, 2], "block_table": [[1, 2], [3, 0]]}
    tensors = {name: torch.tensor(value, dtype=torch.int32) for name, value in tensors.items()}
    return PagedBatch(**(tensors | changes), max_query_len=2, max_seq_len=4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query_start_loc": torch.zeros(2, dtype=torch.int32)}, "2 seq_lens do not fit query_start_loc"),
        ({"block_table": torch.zeros(3, 2, dtype=torch.int32)}, r"block_table \(3, 2\)"),
        ({"block_table": torch.zeros(2, dtype=torch.int32)}, r"block_table \(2,\)"),
        ({"seq_lens": torch.tensor([4, 2])}, "seq_lens must be int32, not torch.int64"),
        ({"block_table": torch.zeros(2, 2, dtype=torch.int64)}, "block_table must be int32, not torch.int64"),
        ({"seq_lens": torch.ones(4, dtype=torch.int32)[::2]}, "seq_lens must be contiguous"),
        ({"block_table": torch.ones(2, 2, dtype=torch.int32).t()}, "block_table must have dense rows"),
        (
            {"seq_lens_cpu": torch.zeros(3, dtype=torch.int32)},
            r"seq_lens_cpu \(3,\) on cpu is not seq_lens on the host",
        ),
        ({"query_start_loc_cpu": torch.zeros(3, device="meta")}, "on meta is not query_start_loc on the host"),
    ],
    ids=str,
)
def test_a_batch_that_does_not_fit_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        batch_of(**changes)


def test_a_batch_makes_things_once():
    calls = []

    def longest(batch, factor):
        calls.append(factor)
        return int(batch.seq_lens.max()) * factor

    def shortest(batch, factor):
        return int(batch.seq_lens.min()) * factor

    batch = batch_of()
    assert [batch.once(longest, 1), batch.once(longest, 1), batch.once(longest, 2)] == [4, 4, 8]
    assert batch.once(shortest, 1) == 2
    assert batch_of().once(longest, 1) == 4
    assert calls == [1, 2, 1]


def test_lengths_come_from_the_host_where_they_are_known_there():
    assert batch_of().host_lengths() == ([0, 1, 3], [4, 2])
    on_device = {
        name: torch.empty(size, dtype=torch.int32, device="meta")
        for name, size in (("query_start_loc", 3), ("seq_lens", 2))
    }
    on_host = {"query_start_loc_cpu": torch.tensor([0, 1, 3]), "seq_lens_cpu": torch.tensor([4, 2])}
    assert batch_of(**on_device, **on_host).host_lengths() == ([0, 1, 3], [4, 2])
    with pytest.raises(RuntimeError, match="meta"):
        batch_of(**on_device).host_lengths()
