"""FlashInfer, which compiles its kernels at their first use.

A step makes FlashInfer's plan once for all layers, so its time does not count.
"""

import functools
import importlib
import importlib.util
import shutil

import torch

from vllm_opset.ops.attention.paged_batch import PagedBatch, window_sides

WORKSPACE_BYTES = 512 << 20  # for partial results; FlashInfer requires 128 MiB or more
SEEDED = {"seed": 1, "offset": 0}


def unavailable(device: str) -> str | None:
    """Why it is missing: it needs a GPU, and nvcc."""
    if device != "cuda":
        return "FlashInfer is for NVIDIA GPUs"
    if not importlib.util.find_spec("flashinfer"):
        return "FlashInfer is not installed"
    return None if shutil.which("nvcc") else "FlashInfer needs nvcc to compile its kernels"


def paged_attention(
    query, kv_cache, batch, out, *, scale, window=None, soft_cap=0.0, alibi_slopes=None, sinks=None, k_scale=None,
    v_scale=None,
):  # fmt: skip
    """Attention on keys and values without moving them."""
    if alibi_slopes is not None or sinks is not None or k_scale is not None:
        raise NotImplementedError("FlashInfer is not set up here for ALiBi, sinks or fp8")
    left, right = window_sides(window, batch.causal)
    if right not in (None, 0):
        raise NotImplementedError("FlashInfer has no window on the right")
    sizes = (*query.shape[1:], *kv_cache.shape[1:3])
    planned = batch.once(_plan, sizes, query.dtype, scale, -1 if left is None else left, soft_cap)
    planned.wrapper.run(query, kv_cache.chunk(2, dim=-1), out=out)


class _Planned:
    """A wrapper with its plan. Copies of a batch can share it, because it has its own copy of the block table."""

    def __init__(self, wrapper) -> None:
        self.wrapper = wrapper

    def __deepcopy__(self, memo: dict) -> "_Planned":
        return self


def _plan(
    batch: PagedBatch, sizes: tuple[int, int, int, int], dtype: torch.dtype, scale: float, left: int, soft_cap: float
) -> _Planned:
    """Plan a step, which reads lengths back from the device. sizes: query heads, head size, KV heads, page's tokens."""
    flashinfer = importlib.import_module("flashinfer")
    num_heads, head_size, num_kv_heads, block_size = sizes
    num_pages = (batch.seq_lens + block_size - 1) // block_size
    page_start_loc = torch.nn.functional.pad(num_pages.cumsum(0, dtype=torch.int32), (1, 0))
    columns = torch.arange(batch.block_table.shape[1], device=num_pages.device)
    pages = batch.block_table[columns < num_pages[:, None]]
    last_page_len = batch.seq_lens - (num_pages - 1) * block_size
    common = {
        "sm_scale": scale, "window_left": left, "logits_soft_cap": soft_cap, "q_data_type": dtype,
        "kv_data_type": dtype,
    }  # fmt: skip
    shape = (num_heads, num_kv_heads, head_size, block_size)
    if batch.max_query_len == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(), "HND", use_tensor_cores=True)
        wrapper.plan(page_start_loc, pages, last_page_len, *shape, **common)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "HND")
        starts = batch.query_start_loc
        wrapper.plan(starts, page_start_loc, pages, last_page_len, *shape, causal=batch.causal, **common)
    return _Planned(wrapper)


def top_k_top_p_sample(logits, keys, temperature=None, top_k=None, top_p=None, min_p=None, processed=None):
    """Sample as vLLM does, but with a fixed seed: a generator's state cannot be read while a graph is captured."""
    if temperature is None or min_p is not None or processed is not None:
        raise NotImplementedError("FlashInfer draws tokens by top-k and top-p, and nothing else")
    sampling, x = importlib.import_module("flashinfer").sampling, logits / temperature[:, None]
    if top_k is not None and top_p is not None:
        tokens = sampling.top_k_top_p_sampling_from_logits(x, top_k, top_p, **SEEDED)
    elif top_k is not None:
        tokens = sampling.top_k_sampling_from_probs(x.softmax(-1), top_k, **SEEDED)
    elif top_p is not None:
        tokens = sampling.top_p_sampling_from_probs(x.softmax(-1), top_p, **SEEDED)
    else:
        tokens = sampling.sampling_from_logits(x, **SEEDED)
    return tokens, None


@functools.cache
def _workspace() -> torch.Tensor:
    """One workspace for all calls, because they run one after the other."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
