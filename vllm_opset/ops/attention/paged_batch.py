"""The description of a paged batch that all layers of one step share, and the meaning of a window.

A KV cache is [num_blocks, num_kv_heads, block_size, 2 * head_size] with any strides. The first half of the last
dimension is the key, the second half is the value. A block of the cache is also called a page. Position p of request r
is entry p % block_size of block block_table[r, p // block_size]. `packed_cache` and `packed_batch` present keys and
values without a cache, such as those of an encoder, as a paged cache.

Some devices need all keys in one piece of memory and all values in another. No strides of the tensor above can express
that, because its last dimension holds the value right after the key. On these devices the last dimension is split, so
the cache is [num_blocks, num_kv_heads, block_size, 2, head_size]. This is the split KV layout, which a problem names as
`split_kv_layout`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from vllm_opset.ops._strides import check_contiguous, check_rows

# Page size of a packed cache: the smallest that vLLM's backends commonly support.
PACKED_BLOCK_SIZE = 16


class BatchSizes(NamedTuple):
    """The sizes of a batch: the number of query tokens of each request, and the upper bound of their contexts."""

    query_lens: list[int]
    max_seq_len: int


@dataclass(eq=False)
class PagedBatch:
    """The requests of one step. All tensors except the last two are on the device of the cache.

    query_start_loc: int32 [num_reqs + 1], the index of each request's first query token, then the end of the last.

    seq_lens: int32 [num_reqs], the number of keys of each request. The query tokens are the last of these keys.

    block_table: int32 [num_reqs, max_blocks], the blocks of each request. Entries past the last block may hold
    anything. Entries of blocks that no query sees any more may name any block (vLLM: 0).

    max_query_len, max_seq_len: upper bounds, so that no kernel needs to read lengths back from the device.

    causal: if true, a query sees no key after its own position.

    query_start_loc_cpu, seq_lens_cpu: exact copies of the first two in host memory, or None if the host does not know
    them. `host_lengths` gives them to kernels whose operators take lengths from the host.

    All are contiguous, except that the rows of block_table may be apart. A padded request has query_len 0 and seq_len
    0. Raises ValueError for shapes, dtypes and strides that do not fit.
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
        check_contiguous(query_start_loc=self.query_start_loc, seq_lens=self.seq_lens)
        check_rows("block_table", self.block_table)
        for name in ("query_start_loc", "seq_lens", "block_table"):
            if getattr(self, name).dtype != torch.int32:
                raise ValueError(f"{name} must be int32, not {getattr(self, name).dtype}")
            on_host = getattr(self, f"{name}_cpu", None)
            if on_host is not None and (on_host.device.type != "cpu" or on_host.shape != getattr(self, name).shape):
                raise ValueError(f"{name}_cpu {tuple(on_host.shape)} on {on_host.device} is not {name} on the host")

    def host_lengths(self) -> tuple[list[int], list[int]]:
        """query_start_loc and seq_lens as numbers. Without host copies, reads them back and waits for the device."""
        starts = self.query_start_loc if self.query_start_loc_cpu is None else self.query_start_loc_cpu
        lens = self.seq_lens if self.seq_lens_cpu is None else self.seq_lens_cpu
        return starts.tolist(), lens.tolist()

    def once(self, make: Callable, *key) -> Any:
        """`make(batch, *key)`. The first layer that asks computes it; the other layers of the step share the result.

        make: a function at module level, because the result is cached by the function and the key.
        """
        if (make, key) not in self._made:
            self._made[make, key] = make(self, *key)
        return self._made[make, key]

    def forget(self) -> None:
        """Drop what `once` keeps. Call it when the tensors have other values for the next layers."""
        self._made.clear()


def window_sides(window: int | tuple[int, int] | None, causal: bool) -> tuple[int | None, int | None]:
    """How many keys before and after its own position a query sees; None means no limit.

    window: (left, right), where −1 means no limit, as in vLLM. An integer w means (w − 1, 0), and None means no window.
    Raises ValueError for a window that holds no key.
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
    """Views of the keys and of the values, [num_blocks, num_kv_heads, block_size, head_size], for both cache shapes."""
    return kv_cache.unbind(3) if kv_cache.dim() == 5 else kv_cache.chunk(2, dim=-1)


def refuse_split_kv(problem: Any) -> str | None:
    """The answer of `supports` for a kernel that takes each value beside its key, not the split KV layout."""
    return "it takes a KV cache with each value beside its key, not a split one" if problem.split_kv_layout else None


def packed_batch(query_start_loc: torch.Tensor, max_query_len: int, causal: bool = False) -> PagedBatch:
    """The batch for attention among the tokens of each request, over the result of `packed_cache`.

    query_start_loc: int32 [num_reqs + 1]. Make the batch once a step.
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

    So every request starts at the start of a page, and each key and value is copied only once.

    key, value: [T, num_kv_heads, head_size], any strides. Returns [T, num_kv_heads, PACKED_BLOCK_SIZE, 2 * head_size].
    """
    num_tokens, num_kv_heads, head_size = key.shape
    tokens = key.new_zeros(num_tokens + PACKED_BLOCK_SIZE - 1, num_kv_heads, 2 * head_size)
    torch.cat((key, value), dim=-1, out=tokens[:num_tokens])
    return tokens.unfold(0, PACKED_BLOCK_SIZE, 1).transpose(2, 3)
