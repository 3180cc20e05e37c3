"""Batches that reach everything that paged_attention compiles while it serves."""

from collections.abc import Iterator

import torch

from vllm_opset.kernels.triton.paged_attention._call import thresholds
from vllm_opset.ops.attention.paged_batch import BatchSizes
from vllm_opset.variants import Limits, powers_up_to


def batches(limits: Limits) -> Iterator[BatchSizes]:
    """Batches of the longest queries, of a lone request, and of one request beside others that decode.

    They come in the order in which they take long to compile. Compiled code changes where the queries of a request pass
    a power of two, and where a step is full. It changes too where contexts, or the number of requests, reach another
    entry of a launch table.
    """
    for query_lens in _query_lens(limits.max_num_batched_tokens, limits.max_num_seqs, limits.max_model_len):
        alone, longest = len(query_lens) == 1, limits.max_model_len  # several requests split no keys that one does not
        for max_seq_len in powers_up_to(longest) if alone else (1, longest):
            yield BatchSizes(query_lens, max_seq_len)


def _query_lens(most_tokens: int, most_requests: int, longest: int) -> Iterator[list[int]]:
    requests = min(most_requests, most_tokens)
    left, query_lens = most_tokens - requests, []
    for _ in range(requests):
        query_lens.append(1 + min(left, longest - 1))
        left -= query_lens[-1] - 1
    yield query_lens
    powers = {*powers_up_to(min(most_tokens, longest))}
    beyond = {size + 1 for size in powers if size <= _verify_queries() and size < max(powers)}
    for num_queries in sorted(powers | beyond, reverse=True):
        most_others = min(most_requests - 1, most_tokens - num_queries)
        if num_queries > 2 * _verify_queries() or not most_others:
            yield [num_queries]  # beside others, so many queries launch what they launch alone
        elif num_queries > _verify_queries():
            yield from ([num_queries], [num_queries] + [1] * most_others)
        else:
            for requests in powers_up_to(most_others + 1):
                yield [num_queries] + [1] * (requests - 1)


def _verify_queries() -> int:
    """The most queries of a request that decode and verify take: one row each, where KV heads have one query head."""
    return thresholds(torch.device("cuda"))["verify_rows"]
