"""The contracts' samples with the KV cache that the NPU's operators expect: the split KV layout, in blocks of 128."""

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from functools import partial
from unittest.mock import patch

from vllm_opset.ops.attention._paged_inputs import SPLIT_KV, PagedCase

BLOCK_SIZE = 128


def case(
    requests: Sequence[tuple[int, int]], *, layout: str = SPLIT_KV, block_size: int = BLOCK_SIZE, **options
) -> PagedCase:
    """Makes a case with such a cache, unless it asks for another one. Shared pages need sequences at least as long."""
    if options.get("shared_pages", 0) * block_size > min(seq_len for _, seq_len in requests):
        requests = tuple((query_len, 8 * seq_len) for query_len, seq_len in requests)
    return PagedCase(requests, layout=layout, block_size=block_size, **options)


# This replaces the contract's MIXED, so that its properties are checked over several blocks.
MIXED = case(((1, 377), (150, 150), (70, 300), (1, 34)))
# Sequences that span several blocks and meet their ends.
LONG = {
    "decode over blocks": case(((1, 128), (1, 129), (1, 700), (1, 1), (1, 256))),
    "chunks that begin and end at a block": case(((128, 384), (127, 384), (129, 385), (1, 385))),
    "a few queries each, over blocks": case(((4, 300), (3, 140), (1, 129), (0, 0))),
    "GQA over blocks, heads of 128": case(((1, 300), (140, 290), (0, 0)), num_heads=8, num_kv_heads=1, head_size=128),
    "windows over blocks": case(((1, 500), (200, 410), (300, 300)), window=130),
    "a window that frees blocks": case(((1, 700), (5, 600)), window=128),
    "a window of one, over blocks": case(((1, 257), (3, 256)), window=1),
    "padded rows and requests, over blocks": case(((1, 200), (0, 0), (90, 290), (0, 0)), padded_rows=7),
}


@contextlib.contextmanager
def split_caches() -> Iterator[None]:
    """Within it, all samples and properties that do not specify their cache get such a cache."""
    attention = importlib.import_module("vllm_opset.ops.attention.paged_attention")
    cache = importlib.import_module("vllm_opset.ops.cache.reshape_and_cache")
    with (
        patch.object(attention, "PagedCase", case),
        patch.object(attention, "MIXED", MIXED),
        patch.object(cache, "_inputs", partial(cache._inputs, layout=SPLIT_KV)),
    ):
        yield
