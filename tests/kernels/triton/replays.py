"""Repeats one call in a replayed CUDA graph: results that depend on the order of programs differ at times."""

import torch

from vllm_opset.kernel import kernels_of
from vllm_opset.ops.attention._paged_inputs import PagedCase

REPLAYS = 10


def assert_same_bits(case: PagedCase, num_calls: int) -> None:
    """num_calls: calls in one graph."""
    (query, kv_cache, batch, first), options = case.make("again", "cuda", torch.bfloat16)
    run = kernels_of("paged_attention")["triton"].run
    run(query, kv_cache, batch, first, **options)
    graph = torch.cuda.CUDAGraph()
    outs = torch.zeros(num_calls, *first.shape, dtype=first.dtype, device="cuda")
    with torch.cuda.graph(graph):
        for out in outs:
            run(query, kv_cache, batch, out, **options)
    for _ in range(REPLAYS):
        outs.zero_()
        graph.replay()
        assert torch.equal(outs, first.expand_as(outs))
