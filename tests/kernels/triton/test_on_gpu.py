"""Properties that need a GPU: sizes beyond 32-bit offsets, and work in flight on other streams.

Parity on a GPU (`vllm-opset parity --device cuda`) checks the contracts, captured and replayed as well.
"""

import pytest
import torch

from vllm_opset import ops
from vllm_opset.kernel import kernels_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: runs on one")
BEYOND_32_BITS = 2**31  # elements


def triton(op):
    return kernels_of(op.name)["triton"].run


@pytest.mark.parametrize("op", [ops.silu_and_mul, ops.gelu_new, ops.rms_norm], ids=lambda op: op.name)
def test_rows_beyond_32_bit_offsets(op):
    x = torch.empty(BEYOND_32_BITS // 4096 + 8, 4096, dtype=torch.bfloat16, device="cuda").normal_()
    arguments = (x[0], 1e-6) if op is ops.rms_norm else ()
    got = triton(op)(x, *arguments)
    for rows in (slice(0, 8), slice(-8, None)):
        torch.testing.assert_close(got[rows], op(x[rows], *arguments))


@pytest.mark.parametrize("op", [ops.reshape_and_cache, ops.rope_cache], ids=lambda op: op.name)
def test_cache_beyond_32_bit_offsets(op):
    heads, block_size, size = 8, 16, 128
    num_blocks = BEYOND_32_BITS // (heads * block_size * 2 * size) + 2
    caches = [torch.zeros(num_blocks, heads, block_size, 2 * size, dtype=torch.bfloat16, device="cuda") for _ in "ab"]
    slots = torch.tensor([0, num_blocks * block_size - 1, num_blocks * block_size // 2], device="cuda")
    key, value = (torch.randn(3, heads, size, device="cuda").bfloat16() for _ in "kv")
    for run, cache in zip((triton(op), op), caches, strict=True):
        arguments = (key, value, cache, slots)
        if op is ops.rope_cache:
            table = torch.ones(4, size, dtype=torch.bfloat16, device="cuda")
            positions = torch.arange(3, device="cuda")
            arguments = (
                torch.zeros(3, heads, size, device="cuda").bfloat16(),
                key,
                value,
                positions,
                table,
                True,
                cache,
                slots,
            )
        run(*arguments)
    assert torch.equal(*caches)


def test_a_kernel_waits_for_the_one_before():
    """In a chain, each call reads the result of the one before. A replay must give the same as separate calls.

    In a graph, the next kernel is launched as soon as its predecessor allows it. The rows are long and few. A kernel
    therefore takes longer than a launch, and the GPU has room for both kernels at once.
    """
    start = torch.randn(2, 128, 16384, device="cuda").bfloat16()
    chained, one_by_one = start.clone(), start.clone()
    step = triton(ops.fused_add_rms_norm)
    for _ in range(100):
        step(*one_by_one, None, 1e-6)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            step(*chained, None, 1e-6)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(chained, one_by_one)
