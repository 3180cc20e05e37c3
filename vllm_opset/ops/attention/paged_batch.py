"""What the layers of one step share about a paged batch, and what a window means.

A KV cache is [num_blocks, num_kv_heads, block_size, 2 * head_size] with any strides: the key in the first half of the
last dimension, the value in the second. Position p of a request lies in slot p % block_size of the page that its row
of the block table names at p // block_size. `packed_cache` and `packed_batch` show tensors without a cache, such as an
encoder's, as if they were one.

Some devices want all keys in one piece of memory and all values in another, which no strides of such a tensor can say:
the value of a token would have to follow its key. There the cache is [num_blocks, num_kv_heads, block_size, 2,
head_size], the same with its last dimension split, and its problem says `kv_apart`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

# Page size of a packed cache: the smallest that vLLM's backends commonly support.
PACKED_BLOCK_SIZE = 16


class BatchSizes(NamedTuple):
    """The sizes of a batch: query tokens of each request, and the upper bound of their contexts."""

    query_lens: list[int]
    max_seq_len: int


@dataclass(eq=False)
class PagedBatch:
    """The requests of one step. All tensors but the last two are on the device of the cache.

    query_start_loc: int32 [num_reqs + 1], where the query tokens of a request start among those of the batch, and the
    end of the last. seq_lens: int32 [num_reqs], keys of a request, its query tokens included: these are the last ones.
    block_table: int32 [num_reqs, max_blocks], the pages of a request. Entries past its last page may hold anything;
    entries of pages that no query sees any more may name any page (vLLM: 0).
    max_query_len, max_seq_len: upper bounds, so that nothing must be read back from a device.
    causal: whether a query sees no key after its own position.
    query_start_loc_cpu, seq_lens_cpu: the first two in the host's memory, where they are known there, to the number:
    no bounds. For kernels whose operators take lengths from the host, by `host_lengths`.
    A padded request has query_len 0 and seq_len 0. Raises ValueError for shapes and dtypes that do not fit.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int
    causal: bool = True
    query_start_loc_cpu: torch.Tensor | None = None
    seq_lens_cpu: torch.Tensor | None = None
    _made: dict = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        num_reqs = self.seq_lens.shape[0]
        if self.query_start_loc.shape != (num_reqs + 1,) or self.block_table.shape[:-1] != (num_reqs,):
            raise ValueError(
                f"{num_reqs} seq_lens do not fit query_start_loc {tuple(self.query_start_loc.shape)} "
                f"and block_table {tuple(self.block_table.shape)}"
            )
        for name in ("query_start_loc", "seq_lens", "block_table"):
            if getattr(self, name).dtype != torch.int32:
                raise ValueError(f"{name} must be int32, not {getattr(self, name).dtype}")
            on_host = getattr(self, f"{name}_cpu", None)
            if on_host is not None and (on_host.device.type != "cpu" or on_host.shape != getattr(self, name).shape):
                raise ValueError(f"{name}_cpu {tuple(on_host.shape)} on {on_host.device} is not {name} on the host")

    def host_lengths(self) -> tuple[list[int], list[int]]:
        """query_start_loc and seq_lens as numbers. What is not on the host is read back, which waits for the device."""
        starts = self.query_start_loc if self.query_start_loc_cpu is None else self.query_start_loc_cpu
        lens = self.seq_lens if self.seq_lens_cpu is None else self.seq_lens_cpu
        return starts.tolist(), lens.tolist()

    def once(self, make: Callable, *key) -> Any:
        """`make(batch, *key)`, made by the first layer that asks and shared with the others of the step.

        make: a function at the top of a module; it and the key are what is remembered.
        """
        if (make, key) not in self._made:
            self._made[make, key] = make(self, *key)
        return self._made[make, key]


def window_sides(window: int | tuple[int, int] | None, causal: bool) -> tuple[int | None, int | None]:
    """How many keys before and after its own position a query sees; None is no limit.

    window: (left, right), with vLLM's −1 for no limit; w is (w − 1, 0); None is no window. Raises ValueError for a
    window of no keys.
    """
    if window is None:
        left, right = -1, -1
    elif isinstance(window, int):
        left, right = window - 1, 0
    else:
        left, right = window
    if min(left, right) < (0 if isinstance(window, int) else -1):
        raise ValueError(f"a window of {window} holds no key: give at least 1, or (left, right) with -1 for no limit")
    return None if left < 0 else left, 0 if causal else None if right < 0 else right


def keys_and_values(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and the values of either form of cache: views [num_blocks, num_kv_heads, block_size, head_size]."""
    return kv_cache.unbind(3) if kv_cache.dim() == 5 else kv_cache.chunk(2, dim=-1)


def only_packed(problem: Any) -> str | None:
    """What a kernel's `supports` says of keys and values apart, if it takes them side by side."""
    return "it takes a cache that has each value beside its key, and here they lie apart" if problem.kv_apart else None


def packed_batch(query_start_loc: torch.Tensor, max_query_len: int, causal: bool = False) -> PagedBatch:
    """The batch for attention among the tokens of each request, over what `packed_cache` gives.

    query_start_loc: int32 [num_reqs + 1]. Make it once a step.
    """
    pages = torch.arange(0, max_query_len, PACKED_BLOCK_SIZE, dtype=torch.int32, device=query_start_loc.device)
    return PagedBatch(
        query_start_loc=query_start_loc,
        seq_lens=query_start_loc.diff(),
        block_table=query_start_loc[:-1, None] + pages,
        max_query_len=max_query_len,
        max_seq_len=max_query_len,
        causal=causal,
    )


def packed_cache(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A KV cache whose pages overlap: page n holds the tokens n … n + PACKED_BLOCK_SIZE − 1 of the batch.

    So every request starts at a page, and each key and value is copied once. key, value: [T, num_kv_heads, head_size],
    any strides. Returns [T, num_kv_heads, PACKED_BLOCK_SIZE, 2 * head_size].
    """
    num_tokens, num_kv_heads, head_size = key.shape
    tokens = key.new_zeros(num_tokens + PACKED_BLOCK_SIZE - 1, num_kv_heads, 2 * head_size)
    torch.cat((key, value), dim=-1, out=tokens[:num_tokens])
    return tokens.unfold(0, PACKED_BLOCK_SIZE, 1).transpose(2, 3)
