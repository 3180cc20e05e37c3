"""The image tokens of a step that see each other, as in prefix LMs such as Gemma-3.

Each of them sees its image, and the keys before as any other token. If an image is no longer than the window, its
tokens together see one piece of keys up to the end of the image. So they attend as the query of a request that ends
there, in a batch that is not causal. vLLM leaves out images that are longer than the window.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from vllm_opset.ops.attention.paged_batch import PagedBatch


class ImageTokens(NamedTuple):
    """rows: int64 [num_tokens], their rows of the step. batch: has a request for each image of the step."""

    rows: torch.Tensor
    batch: PagedBatch


def image_tokens(batch: PagedBatch, ranges: Mapping[int, Sequence[tuple[int, int]]] | None) -> ImageTokens | None:
    """The image tokens of a batch; None if it has none. ranges: first and last positions of each request's images."""
    pieces = list(_pieces(batch, ranges)) if ranges else []
    if not pieces:
        return None
    requests, rows, ends = zip(*pieces, strict=True)
    device, lengths = batch.seq_lens.device, [len(of_image) for of_image in rows]

    def on_device(values, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    of_images = PagedBatch(
        query_start_loc=on_device([0, *accumulate(lengths)]),
        seq_lens=on_device(ends),
        block_table=batch.block_table[on_device(requests)],
        max_query_len=max(lengths),
        max_seq_len=max(ends),
        causal=False,
    )
    return ImageTokens(on_device([row for of_image in rows for row in of_image], torch.int64), of_images)


def _pieces(batch: PagedBatch, ranges: Mapping[int, Sequence[tuple[int, int]]]):
    """The request, the rows and the end of each image that has query tokens."""
    starts, seq_lens = batch.host_lengths()
    for request, images in ranges.items():
        begin, seq_len = starts[request], seq_lens[request]
        to_row = starts[request + 1] - seq_len  # the row of a position
        for first, last in images:
            rows = range(max(begin, first + to_row), min(last, seq_len - 1) + to_row + 1)
            if rows:
                yield request, rows, rows.stop - to_row
