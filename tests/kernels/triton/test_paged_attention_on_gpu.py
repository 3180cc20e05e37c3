"""paged_attention where only a GPU can take it: contexts, batches and caches of real size, and programs that race."""

import pytest
import torch
from replays import assert_same_bits

from vllm_opset import ops
from vllm_opset.kernel import kernels_of
from vllm_opset.ops.paged_attention import TOLERANCES
from vllm_opset.ops.paged_batch import PagedBatch
from vllm_opset.ops.paged_inputs import PagedCase

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: runs on one")
BEYOND_32_BITS = 2**31  # elements


def attention_agrees(query, kv_cache, batch, options) -> None:
    got, want = torch.zeros_like(query), torch.zeros_like(query)
    kernels_of("paged_attention")["triton"].run(query, kv_cache, batch, got, **options)
    ops.paged_attention(query, kv_cache, batch, want, **options)
    tolerance = TOLERANCES[query.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance.rtol, atol=tolerance.atol)


@pytest.mark.parametrize("query_len", [1, 5, 300, 9000])
def test_attention_over_131072_tokens(query_len):
    case = PagedCase(((query_len, 131072),), num_heads=8, head_size=128)
    (query, kv_cache, batch, _), options = case.make("long", "cuda", torch.bfloat16)
    attention_agrees(query, kv_cache, batch, options)


@pytest.mark.parametrize("longest_prompt", [1, 700])
def test_attention_of_256_requests_of_mixed_lengths(longest_prompt):
    draw = torch.Generator().manual_seed(0)
    seq_lens = torch.randint(longest_prompt, 5000, (256,), generator=draw).tolist()
    prompts = [longest_prompt if index % 16 == 7 else 1 for index in range(256)]
    case = PagedCase(tuple(zip(prompts, seq_lens, strict=True)), num_heads=8, head_size=128)
    (query, kv_cache, batch, _), options = case.make("mixed lengths", "cuda", torch.bfloat16)
    attention_agrees(query, kv_cache, batch, options)


@pytest.mark.parametrize("query_len", [1, 40])
def test_attention_over_a_cache_beyond_32_bit_offsets(query_len):
    heads, block_size, size, pages = 8, 16, 128, 64
    num_blocks = BEYOND_32_BITS // (heads * block_size * 2 * size) + pages
    kv_cache = torch.zeros(num_blocks, heads, block_size, 2 * size, dtype=torch.bfloat16, device="cuda")
    kv_cache[-pages:].normal_()
    batch = PagedBatch(
        torch.tensor([0, query_len], dtype=torch.int32, device="cuda"),
        torch.tensor([pages * block_size], dtype=torch.int32, device="cuda"),
        torch.arange(num_blocks - pages, num_blocks, dtype=torch.int32, device="cuda")[None],
        query_len,
        pages * block_size,
    )
    query = torch.randn(query_len, 32, size, device="cuda").bfloat16()
    attention_agrees(query, kv_cache, batch, {"scale": size**-0.5})


def test_attention_splits_keys_again_and_again():
    """Programs of a tile meet in one place, a thousand times: any that reads too early gives other bits."""
    case = PagedCase(((1, 3000), (1, 5000), (1, 70)), num_heads=8, head_size=128)
    assert_same_bits(case, 100)
