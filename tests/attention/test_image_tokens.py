"""The image tokens of a step that see each other."""

import torch

from vllm_opset.attention.images import image_tokens
from vllm_opset.ops.attention.paged_batch import PagedBatch

# Two prefills, of which the second has four cached tokens, and a decode.
BATCH = PagedBatch(
    query_start_loc=torch.tensor([0, 8, 14, 15], dtype=torch.int32),
    seq_lens=torch.tensor([8, 10, 20], dtype=torch.int32),
    block_table=torch.arange(6, dtype=torch.int32).view(3, 2),
    max_query_len=8,
    max_seq_len=20,
)


def test_images_become_requests_that_end_with_them():
    # The first image of the second request is half cached; those of the third are in its cache.
    images = image_tokens(BATCH, {0: [(1, 3), (5, 6)], 1: [(2, 5), (8, 9)], 2: [(0, 9)]})
    assert images.rows.tolist() == [1, 2, 3, 5, 6, 8, 9, 12, 13]
    assert images.batch.query_start_loc.tolist() == [0, 3, 5, 7, 9]
    assert images.batch.seq_lens.tolist() == [4, 7, 6, 10]
    assert images.batch.block_table.tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert (images.batch.max_query_len, images.batch.max_seq_len, images.batch.causal) == (3, 10, False)


def test_a_step_without_images_has_none():
    assert image_tokens(BATCH, None) is None
    assert image_tokens(BATCH, {0: [], 1: [], 2: [(3, 9)]}) is None
