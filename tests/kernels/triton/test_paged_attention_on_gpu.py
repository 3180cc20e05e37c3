"""paged_attention at sizes that need a GPU: contexts, batches and caches of real size, and programs that race."""

import dataclasses

import pytest
import torch
from replays import assert_same_bits

from vllm_opset import ops
from vllm_opset.kernel import kernels_of
from vllm_opset.ops.attention._paged_inputs import PagedCase
from vllm_opset.ops.attention.paged_attention import TOLERANCES
from vllm_opset.ops.attention.paged_batch import PagedBatch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: runs on one")
BEYOND_32_BITS = 2**31  # elements


def case_agrees(case: PagedCase) -> None:
    (query, kv_cache, batch, _), options = case.make("on a GPU", "cuda", torch.bfloat16)
    attention_agrees(query, kv_cache, batch, options, case)


def attention_agrees(query, kv_cache, batch, options, case: PagedCase) -> None:
    """Compares each request by the root mean square of its own result: a long one's is a tenth of a short one's."""
    got, want = torch.zeros_like(query), torch.zeros_like(query)
    kernels_of("paged_attention")["triton"].run(query, kv_cache, batch, got, **options)
    ops.paged_attention(query, kv_cache, batch, want, **options)
    tolerance, query_lens = TOLERANCES[query.dtype], batch.query_start_loc.diff().tolist()
    for request, (mine, theirs) in enumerate(zip(got.split(query_lens), want.split(query_lens), strict=True)):
        scale = dataclasses.replace(case, requests=case.requests[request : request + 1]).output_scale()
        torch.testing.assert_close(mine, theirs, rtol=tolerance.rtol, atol=tolerance.atol * scale)


@pytest.mark.parametrize("query_len", [1, 5, 300, 9000])
def test_attention_over_131072_tokens(query_len):
    case_agrees(PagedCase(((query_len, 131072),), num_heads=8, head_size=128))


@pytest.mark.parametrize("longest_prompt", [1, 700])
@pytest.mark.parametrize(("num_reqs", "longest"), [(256, 5000), (700, 1500)])
def test_attention_of_hundreds_of_requests_of_mixed_lengths(num_reqs, longest, longest_prompt):
    """Includes batches of more than 256 requests, the number that is planned together."""
    draw = torch.Generator().manual_seed(0)
    seq_lens = torch.randint(longest_prompt, longest, (num_reqs,), generator=draw).tolist()
    prompts = [longest_prompt if index % 16 == 7 else 1 for index in range(num_reqs)]
    case_agrees(PagedCase(tuple(zip(prompts, seq_lens, strict=True)), num_heads=8, head_size=128))


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
    case = PagedCase(((query_len, pages * block_size),), num_heads=32, num_kv_heads=heads, head_size=size)
    attention_agrees(query, kv_cache, batch, {"scale": size**-0.5}, case)


def test_attention_splits_keys_again_and_again():
    """The programs of a tile meet at one counter, a thousand times: any that reads too early gives other bits."""
    case = PagedCase(((1, 3000), (1, 5000), (1, 70)), num_heads=8, head_size=128)
    assert_same_bits(case, 100)
