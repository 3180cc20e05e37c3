"""Inputs for the ops on a paged KV cache. Everything that a kernel must not read is poisoned."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from vllm_opset.ops import _samples
from vllm_opset.ops.attention.paged_batch import PagedBatch, keys_and_values, packed_batch, packed_cache, window_sides
from vllm_opset.ops.contract import Sample

NAN = float("nan")
# The value of rows that a kernel must not write.
UNTOUCHED = 99.0
# Kernels multiply the keys and values of an fp8 cache by these. The two differ, so that a kernel that swaps them fails.
SCALES = {"k_scale": 0.25, "v_scale": 0.5}
# The entries of a block table past the last page of a sequence. No cache has such a page.
NO_PAGE = 2**30

# Memory layouts of a cache [num_blocks, num_kv_heads, block_size, width]: the shape of the storage, and the view of it.
LAYOUTS = {
    "HND": lambda n, h, s, w: ((n, h, s, w), lambda storage: storage),
    "NHD": lambda n, h, s, w: ((n, s, h, w), lambda storage: storage.transpose(1, 2)),
    "HND, layers interleaved": lambda n, h, s, w: ((n, 3, h, s, w), lambda storage: storage[:, 1]),
    "NHD, layers interleaved": lambda n, h, s, w: ((n, 3, s, h, w), lambda storage: storage[:, 1].transpose(1, 2)),
    "HND, padded rows": lambda n, h, s, w: ((n, h, s, w + 16), lambda storage: storage[..., :w]),
}
# The layout with separate keys and values: a cache [num_blocks, num_kv_heads, block_size, 2, width / 2].
SPLIT_KV = "split KV layout"
SHAPES = LAYOUTS | {
    SPLIT_KV: lambda n, h, s, w: ((2, n, s, h, w // 2), lambda storage: storage.permute(1, 3, 2, 0, 4)),
}


@dataclass(frozen=True)
class PagedCase:
    """One call of paged_attention.

    requests: (query_len, seq_len) of each request. cache_dtype: None for the dtype of the query.

    shared_pages: the number of pages at the start that all requests share. padded_rows: the number of rows of query and
    out after the last query token.

    loose_bounds: whether max_query_len and max_seq_len exceed the true maxima. query_std: the standard deviation of the
    query, which sets the spread of the scores.
    """

    requests: Sequence[tuple[int, int]]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    window: int | tuple[int, int] | None = None
    soft_cap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    causal: bool = True
    layout: str = "HND"
    cache_dtype: torch.dtype | None = None
    shared_pages: int = 0
    padded_rows: int = 0
    loose_bounds: bool = False
    query_std: float = 1.0

    def sample(self, name: str, device: str, dtype: torch.dtype) -> Sample:
        return Sample(name, lambda: self.make(name, device, dtype), self.output_scale())

    def make(self, seed: str, device: str, dtype: torch.dtype) -> tuple[tuple, dict]:
        """Arguments of paged_attention."""
        rng = _samples.generator(seed)
        tokens = self.tokens(rng, device, dtype)
        options = self.options(rng, device, dtype)
        if self.cache_dtype is not None:
            row = torch.tensor([*SCALES.values()], device=device).repeat_interleave(self.head_size)
            tokens = [(token / row).to(self.cache_dtype) for token in tokens]
        kv_cache, block_table = self.cache(tokens, _samples.generator(f"{seed}, pages"))
        batch = self.batch(block_table)
        return (self.query(rng, device, dtype), kv_cache, batch, self.out(device, dtype)), options

    def options(self, rng: torch.Generator, device: str, dtype: torch.dtype) -> dict[str, object]:
        """The keyword arguments of paged_attention."""
        options = {"scale": self.head_size**-0.5, "window": self.window, "soft_cap": self.soft_cap}
        if self.alibi:
            slopes = [2 ** (-8 * (head + 1) / self.num_heads) for head in range(self.num_heads)]
            options["alibi_slopes"] = torch.tensor(slopes, dtype=torch.float32, device=device)
        if self.sinks:
            options["sinks"] = _samples.normal((self.num_heads,), dtype, device, rng)
        return options if self.cache_dtype is None else options | scales(device)

    @property
    def num_tokens(self) -> int:
        return sum(query_len for query_len, _ in self.requests)

    def query(self, rng: torch.Generator, device: str, dtype: torch.dtype) -> torch.Tensor:
        """The query, a slice of the fused projection's result, with NaN in the padded rows."""
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_size
        qkv = torch.full((self.num_tokens + self.padded_rows, width), NAN, dtype=dtype, device=device)
        query = qkv[:, : self.num_heads * self.head_size].unflatten(1, (self.num_heads, self.head_size))
        shape = (self.num_tokens, self.num_heads, self.head_size)
        query[: self.num_tokens] = _samples.normal(shape, dtype, device, rng, self.query_std)
        return query

    def out(self, device: str, dtype: torch.dtype) -> torch.Tensor:
        shape = (self.num_tokens + self.padded_rows, self.num_heads, self.head_size)
        out = torch.full(shape, UNTOUCHED, dtype=dtype, device=device)
        return _samples.row_view(out) if "padded" in self.layout else out

    def tokens(self, rng: torch.Generator, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        """The key and value of every position: one tensor [seq_len, num_kv_heads, 2 * head_size] for each request."""
        row = (self.num_kv_heads, 2 * self.head_size)
        tokens = [_samples.normal((seq_len, *row), dtype, device, rng) for _, seq_len in self.requests]
        for request in tokens:
            shared = self.shared_pages * self.block_size
            request[:shared] = tokens[0][:shared]
        return tokens

    def cache(self, tokens: list[torch.Tensor], rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """The cache, which holds the tokens in pages in random order, and its block table.

        Page 0 is vLLM's null page. The null page, the free pages and all slots without a token are NaN.
        """
        num_pages = [math.ceil(len(request) / self.block_size) for request in tokens]
        num_blocks = sum(num_pages) + 3
        device = tokens[0].device
        kv_cache = poisoned_cache(self.layout, num_blocks, self.num_kv_heads, self.block_size, tokens[0])
        block_table = torch.full((len(tokens), max(num_pages) + 2), NO_PAGE, dtype=torch.int32, device=device)
        free = (torch.randperm(num_blocks - 1, generator=rng) + 1).tolist()
        for row, (request, first_seen) in enumerate(zip(tokens, self.first_seen(), strict=True)):
            for index, page in enumerate(request.split(self.block_size) if len(request) else ()):
                if (index + 1) * self.block_size <= first_seen:
                    block_table[row, index] = 0
                elif row > 0 and index < self.shared_pages:
                    block_table[row, index] = block_table[0, index]
                else:
                    block_table[row, index] = free.pop()
                    for half, part in zip(keys_and_values(kv_cache), page.chunk(2, dim=-1), strict=True):
                        half[block_table[row, index], :, : len(page)] = part.transpose(0, 1)
        return kv_cache, block_table

    def first_seen(self) -> list[int]:
        """The first position of each request that one of its queries sees."""
        left, _ = window_sides(self.window, self.causal)
        return [0 if left is None else max(0, seq_len - query_len - left) for query_len, seq_len in self.requests]

    def batch(self, block_table: torch.Tensor) -> PagedBatch:
        query_lens, seq_lens = torch.tensor(self.requests, dtype=torch.int32).view(-1, 2).unbind(1)
        query_start_loc = torch.nn.functional.pad(query_lens.cumsum(0, dtype=torch.int32), (1, 0))
        slack = 37 if self.loose_bounds else 0
        return PagedBatch(
            query_start_loc.to(block_table.device),
            seq_lens.contiguous().to(block_table.device),
            block_table,
            max_query_len=max(query_len for query_len, _ in self.requests) + slack,
            max_seq_len=max(seq_len for _, seq_len in self.requests) + slack,
            causal=self.causal,
        )

    def output_scale(self) -> float:
        """The largest root mean square of the output, which is at the query that sees the fewest keys.

        A softmax over n standard normal scores averages like one over n / e equal scores.
        """
        left, right = window_sides(self.window, self.causal)
        fewest = math.inf
        for query_len, seq_len in self.requests:
            if query_len:
                before = seq_len - query_len if left is None else min(left, seq_len - query_len)
                after = query_len - 1 if right is None else 0
                fewest = min(fewest, before + 1 + after)
        return 1.0 if self.query_std > 1 else min(1.0, math.sqrt(math.e / max(fewest, 1)))


def poisoned_cache(
    layout: str, num_blocks: int, num_kv_heads: int, block_size: int, like: torch.Tensor
) -> torch.Tensor:
    """A cache full of NaN in a layout of `SHAPES`. `like` gives the width of its rows, its dtype and its device."""
    shape, view = SHAPES[layout](num_blocks, num_kv_heads, block_size, like.shape[-1])
    return view(torch.full(shape, NAN, device=like.device).to(like.dtype))


def scales(device: str) -> dict[str, torch.Tensor]:
    """k_scale and v_scale of an fp8 cache, as the ops take them."""
    return {name: torch.tensor(scale, device=device) for name, scale in SCALES.items()}


def packed_sample(device: str, dtype: torch.dtype) -> Sample:
    """An encoder without a cache: the keys are the tokens of the batch."""
    case = PagedCase(((9, 9), (33, 33), (1, 1), (0, 0)), causal=False)

    def make() -> tuple[tuple, dict]:
        rng = _samples.generator("packed")
        shape = (case.num_tokens, case.num_kv_heads, case.head_size)
        key, value = _samples.normal(shape, dtype, device, rng), _samples.normal(shape, dtype, device, rng)
        query_start_loc = torch.tensor([0, 9, 42, 43, 43], dtype=torch.int32, device=device)
        batch = packed_batch(query_start_loc, max_query_len=33)
        inputs = (case.query(rng, device, dtype), packed_cache(key, value), batch, case.out(device, dtype))
        return inputs, {"scale": case.head_size**-0.5}

    return Sample("packed, without a cache", make)


# (query_len, seq_len) of each request, and further options, by the device that it is a fair load for.
BENCH_SHAPE = {
    "cuda": {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "block_size": 16},
    "cpu": {"num_heads": 16, "num_kv_heads": 8, "head_size": 64, "block_size": 32},
}
FP8_CACHE = {"cache_dtype": torch.float8_e4m3fn}
BENCH_CASES = {
    "cuda": {
        "decode B1 ctx1024": (((1, 1024),), {}),
        "decode B1 ctx4096": (((1, 4096),), {}),
        "decode B1 ctx32768": (((1, 32768),), {}),
        "decode B1 ctx131072": (((1, 131072),), {}),
        "decode B4 ctx8192": (((1, 8192),) * 4, {}),
        "decode B16 ctx4096": (((1, 4096),) * 16, {}),
        "decode B64 ctx1024": (((1, 1024),) * 64, {}),
        "decode B64 ctx4096": (((1, 4096),) * 64, {}),
        "decode B64 ctx16384": (((1, 16384),) * 64, {}),
        "decode B64 ctx256 to 16384": (tuple((1, 256 * 2 ** (i % 7)) for i in range(64)), {}),
        "decode B256 ctx1024": (((1, 1024),) * 256, {}),
        "decode B256 ctx4096": (((1, 4096),) * 256, {}),
        "prefill B1 S1024": (((1024, 1024),), {}),
        "prefill B1 S4096": (((4096, 4096),), {}),
        "prefill B1 S16384": (((16384, 16384),), {}),
        "prefill B8 S2048": (((2048, 2048),) * 8, {}),
        "prefill B64 S256": (((256, 256),) * 64, {}),
        "chunk B1 q2048 ctx16384": (((2048, 16384),), {}),
        "chunk B8 q512 ctx8192": (((512, 8192),) * 8, {}),
        "spec B64 q4 ctx4096": (((4, 4096),) * 64, {}),
        "spec B64 q8 ctx4096": (((8, 4096),) * 64, {}),
        "mixed B8 q1 to 10 ctx8192": (((1, 8192),) * 7 + ((10, 8192),), {}),
        "mixed B64 q1 to 16 ctx1024": (((1, 1024),) * 63 + ((16, 1024),), {}),
        "mixed B7 q1 to 8192 ctx8192": (((1, 8192),) * 5 + ((8192, 8192), (8179, 8179)), {}),
        "chunk B1 q10 ctx8192": (((10, 8192),), {}),
        "chunk B1 q100 ctx8192": (((100, 8192),), {}),
        "swa4096 decode B64 ctx16384": (((1, 16384),) * 64, {"window": 4096}),
        "swa1024 prefill B1 S16384": (((16384, 16384),), {"window": 1024}),
        "fp8 cache decode B1 ctx32768": (((1, 32768),), FP8_CACHE),
        "fp8 cache decode B64 ctx4096": (((1, 4096),) * 64, FP8_CACHE),
        "fp8 cache decode B64 ctx16384": (((1, 16384),) * 64, FP8_CACHE),
        "fp8 cache spec B64 q4 ctx4096": (((4, 4096),) * 64, FP8_CACHE),
        "fp8 cache prefill B8 S2048": (((2048, 2048),) * 8, FP8_CACHE),
        "soft cap decode B64 ctx4096": (((1, 4096),) * 64, {"soft_cap": 50.0}),
        "soft cap prefill B1 S4096": (((4096, 4096),), {"soft_cap": 50.0}),
        "sinks decode B64 ctx4096": (((1, 4096),) * 64, {"sinks": True}),
        "sinks prefill B8 S2048": (((2048, 2048),) * 8, {"sinks": True}),
    },
    "cpu": {
        "decode B1 ctx200": (((1, 200),), {}),
        "decode B1 ctx2048": (((1, 2048),), {}),
        "decode B16 ctx64 to 192": (tuple((1, 64 + 8 * i) for i in range(16)), {}),
        "decode B16 ctx2048": (((1, 2048),) * 16, {}),
        "soft cap decode B16 ctx64 to 192": (tuple((1, 64 + 8 * i) for i in range(16)), {"soft_cap": 50.0}),
        "swa512 decode B4 ctx2048": (((1, 2048),) * 4, {"window": 512}),
        "spec B16 q4 ctx192": (((4, 192),) * 16, {}),
        "prefill B1 S64": (((64, 64),), {}),
        "prefill B16 S64": (((64, 64),) * 16, {}),
        "prefill B1 S2048": (((2048, 2048),), {}),
        "chunk B1 q512 ctx2048": (((512, 2048),), {}),
        "swa256 prefill B1 S1024": (((1024, 1024),), {"window": 256}),
        "mixed B17 q512 ctx192": (((1, 192),) * 16 + ((512, 512),), {}),
        "mixed B17 q32 ctx1024": (((1, 1024),) * 16 + ((32, 1024),), {}),
    },
}


def bench_samples(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    """The benchmark cases for a device. Pages are in random order, in a cache that holds nothing else."""
    kind = device if device in BENCH_CASES else "cuda"
    for name, (requests, options) in BENCH_CASES[kind].items():
        case = PagedCase(requests, **BENCH_SHAPE[kind], **options)
        yield Sample(name, partial(_bench_inputs, case, device, dtype))


def _bench_inputs(case: PagedCase, device: str, dtype: torch.dtype) -> tuple[tuple, dict]:
    """Arguments as from PagedCase.make, but made on the device, which is faster for gigabytes, and without poison."""
    rng = torch.Generator(device).manual_seed(0)
    num_pages = [math.ceil(seq_len / case.block_size) for _, seq_len in case.requests]
    pages = torch.randperm(sum(num_pages), generator=rng, device=device).to(torch.int32)
    block_table = torch.nn.utils.rnn.pad_sequence(pages.split(num_pages), batch_first=True)
    cache_shape = (sum(num_pages), case.num_kv_heads, case.block_size, 2 * case.head_size)
    kv_cache = torch.randn(cache_shape, generator=rng, device=device, dtype=dtype).to(case.cache_dtype or dtype)
    query_shape = (case.num_tokens, case.num_heads, case.head_size)
    query = torch.randn(query_shape, generator=rng, device=device, dtype=dtype)
    return (query, kv_cache, case.batch(block_table), torch.empty_like(query)), case.options(rng, device, dtype)
