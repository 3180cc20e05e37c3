"""Keys whose probabilities fp16 cannot hold, unless they are multiplied by a power of two."""

import math

import torch

from vllm_opset.kernel import kernels_of
from vllm_opset.ops.attention._paged_inputs import PagedCase


def rare_keys_count(
    cache_dtype: torch.dtype | None, num_queries: int, num_keys: int, device: str, variant: str | None = None
) -> None:
    """All keys but one have the probability 2^-27. Their sum is small, and their values are large.

    cache_dtype: None for queries and a cache in fp16. With fp8, queries are in bf16.
    """
    case = PagedCase(((num_queries, num_keys),), num_heads=1, num_kv_heads=1, cache_dtype=cache_dtype, causal=False)
    dtype = torch.float16 if cache_dtype is None else torch.bfloat16
    (query, kv_cache, batch, out), options = case.make("rare", device, dtype)
    options |= {"scale": 27 * math.log(2)} | {
        name: torch.ones((), device=device) for name in ("k_scale", "v_scale") if name in options
    }
    query.zero_()[..., 0] = 1
    key, value = kv_cache.float().zero_().chunk(2, dim=-1)
    value += 448
    first = batch.block_table[0, 0]
    key[first, 0, 0, 0], value[first, 0, 0] = 1, 0
    cache = torch.cat([key, value], dim=-1).to(kv_cache.dtype)
    kernels_of("paged_attention")["triton"].run(query, cache, batch, out, **options, variant=variant)
    want = (num_keys - 1) * 448 * 2.0**-27
    torch.testing.assert_close(out.float(), torch.full(out.shape, want, device=device), rtol=0.02, atol=0.0)
