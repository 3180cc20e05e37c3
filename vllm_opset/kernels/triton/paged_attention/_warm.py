"""Batches that reach everything that paged_attention compiles while it serves."""

from collections.abc import Iterator

import torch

from vllm_opset.kernels.triton.paged_attention._call import thresholds
from vllm_opset.ops.attention.paged_batch import BatchSizes
from vllm_opset.variants import Limits, powers_up_to


def batches(limits: Limits) -> Iterator[BatchSizes]:
    """Batches of the longest queries, of a lone request, and of one request beside others that decode.

    They come in the order in which they take long to compile. Compiled code changes where the queries of a request pass
    a power of two, and where a step is full. The sizes in the launch tables of decode and verify are the square of the
    number of requests times the longest context. A batch's max_seq_len is a bound that serves this purpose alone. So a
    lone request with the bound n² · L asks for the entry that n requests with contexts of L ask for.
    """
    most_keys = limits.max_num_seqs**2 * limits.max_model_len
    for query_lens in _query_lens(limits.max_num_batched_tokens, limits.max_num_seqs, limits.max_model_len):
        alone = len(query_lens) == 1 and query_lens[0] <= _verify_queries()
        for max_seq_len in powers_up_to(most_keys) if alone else (1, limits.max_model_len):
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
        yield [num_queries]
        others = min(most_requests - 1, most_tokens - num_queries)
        if num_queries <= 2 * _verify_queries() and others:  # beside others, more queries launch what they launch alone
            yield [num_queries] + [1] * others


def _verify_queries() -> int:
    """The most queries of a request that decode and verify take: one row each, where KV heads have one query head."""
    return thresholds(torch.device("cuda"))["verify_rows"]
