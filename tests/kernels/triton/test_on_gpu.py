"""What only a GPU can show: sizes beyond 32-bit offsets, and work in flight on other streams.

Parity on a GPU (`vllm-opset parity --device cuda`) checks the contracts, captured and replayed as well.
"""

import pytest
import torch

from vllm_opset import ops
from vllm_opset.kernel import kernels_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
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
    """Back and forth between two caches in reversed order: what a call reads first, the one before it wrote last.

    Replayed from a graph, where the next kernel is launched as soon as the one before it allows, and small enough that
    both fit the GPU at once.
    """
    tokens, heads, size = 2048, 8, 128
    start = torch.randn(tokens, heads, 2 * size, device="cuda").bfloat16()
    reversed_slots = torch.arange(tokens - 1, -1, -1, device="cuda")
    here, there = start.clone(), torch.zeros_like(start)

    def back_and_forth(times: int) -> None:
        for source, target in [(here, there), (there, here)] * times:
            kv_cache = target.view(-1, 16, heads, 2 * size).transpose(1, 2)
            triton(ops.reshape_and_cache)(source[..., :size], source[..., size:], kv_cache, reversed_slots)

    back_and_forth(1)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        back_and_forth(100)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(here, start)
