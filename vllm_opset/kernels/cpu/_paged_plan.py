"""The plan for attention of a batch on a CPU. It cuts the batch into chunks; each takes one gather and one attention.

The query tokens of a request are cut into blocks of at most QUERY_BLOCK rows, as if the scheduler had chunked its
prompt. A block needs the keys that any of its rows sees. Blocks of equal length form a group. So decoding requests are
one group, whatever else is in the batch, and no query row is padding.

The blocks of a group are processed in chunks whose keys and values fit the cache of a core. The last keys of all blocks
of a chunk are aligned. So the distance between query row i and key j is the same in all blocks, and all chunks of a
group use parts of one mask. A block with fewer keys than the others has padding before its keys. The padding repeats
the first key of the block, so that nothing outside the request is read.

The plan is computed by arithmetic on whole batches, once a step, and the layers share it.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_opset.ops.attention.paged_batch import PagedBatch

# The most query rows of one attention. More rows cost more time for keys that only some of them see. Fewer rows gather
# the same keys more often.
QUERY_BLOCK = 256
# The most bytes of keys and values that are gathered at a time. Fewer bytes stay closer to the core, but take more
# calls. Beyond 32 MiB, the C library would map the memory anew for every layer.
CHUNK_BYTES = 2 << 20

_ZERO = torch.zeros((), dtype=torch.float32)


class Geometry(NamedTuple):
    """A cache as rows. Each row is the key and value of one token and head; the steps are distances in rows."""

    num_rows: int
    row_stride: int
    num_kv_heads: int
    block_size: int
    block_step: int
    head_step: int
    slot_step: int

    def rows_of(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The cache as a view [num_rows, 2 * head_size]. If the cache has gaps, the rows may overlap."""
        return kv_cache.as_strided((self.num_rows, kv_cache.shape[3]), (self.row_stride, kv_cache.stride(3)))


@functools.cache
def geometry(shape: tuple[int, ...], strides: tuple[int, ...]) -> Geometry:
    """The geometry of a cache [num_blocks, num_kv_heads, block_size, 2 * head_size] with strides in any order."""
    _, num_kv_heads, block_size, width = shape
    extents = [(size - 1) * stride for size, stride in zip(shape[:3], strides[:3], strict=True)]
    unit = math.gcd(*(stride for extent, stride in zip(extents, strides[:3], strict=True) if extent)) or width
    return Geometry(
        1 + sum(extents) // unit, unit, num_kv_heads, block_size, *(stride // unit for stride in strides[:3])
    )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks of equal length that one attention processes together.

    rows: the num_blocks * length rows of query and out. heads: all KV heads, or those that fit.

    index: the cache rows, flattened from [num_blocks, heads, num_keys].

    bias: fp32, zero or −inf; broadcasts to [num_blocks, heads, query heads of a KV head, length, num_keys]. None if
    every row sees every key. keys_after: the number of keys after the last row of a block.
    """

    rows: slice | torch.Tensor
    heads: slice
    num_blocks: int
    length: int
    num_keys: int
    index: torch.Tensor
    bias: torch.Tensor | None
    keys_after: int

    def distance(self) -> torch.Tensor:
        """Key position − query position, [length, num_keys]."""
        return _distance(self.length, self.num_keys, self.keys_after)


@dataclass(frozen=True, slots=True)
class Plan:
    """The chunks of a batch. rows_without_keys: the rows of out whose queries see no key."""

    chunks: list[Chunk]
    rows_without_keys: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks of `length` rows, each with `keys_after` keys after its last row.

    The tensors are int [num_blocks]: the request of each block, its first row in the batch, and the keys that its rows
    see, from `start` to before `stop`.
    """

    length: int
    keys_after: int
    request: torch.Tensor
    row: torch.Tensor
    start: torch.Tensor
    stop: torch.Tensor

    def pick(self, which: torch.Tensor | slice) -> "Group":
        tensors = (self.request, self.row, self.start, self.stop)
        return Group(self.length, self.keys_after, *(tensor[which] for tensor in tensors))

    def rows(self) -> slice | torch.Tensor:
        """The rows of the batch in these blocks, [num_blocks * length], as a slice if they are contiguous."""
        first, *_ = rows = self.row.tolist()
        after = first + len(rows) * self.length
        if rows == list(range(first, after, self.length)):
            return slice(first, after)
        return (self.row[:, None] + torch.arange(self.length)).flatten()


def make_plan(
    batch: PagedBatch, left: int | None, right: int | None, cache: Geometry, token_bytes: int, least_tokens: int = 1
) -> Plan:
    """Plans a batch. left, right: see window_sides. token_bytes: bytes of a token's keys and values in the cache.

    least_tokens: requests with fewer query tokens are left out.
    """
    plan = Plan([], [])
    for group in _groups(batch, left, right, least_tokens):
        num_keys = (group.stop - group.start).tolist()
        if min(num_keys, default=1) <= 0:
            plan.rows_without_keys.append(group.pick(group.stop <= group.start).rows())
            group, num_keys = group.pick(group.stop > group.start), [number for number in num_keys if number > 0]
        if num_keys:
            plan.chunks.extend(_chunks(group, num_keys, batch.block_table, left, right, cache, token_bytes))
    return plan


def _groups(batch: PagedBatch, left: int | None, right: int | None, least_tokens: int) -> Iterator[Group]:
    starts, seq_lens = batch.query_start_loc, batch.seq_lens
    num_reqs = len(seq_lens)
    if batch.max_query_len == least_tokens == 1 and int(starts[num_reqs]) == num_reqs:
        request = torch.arange(num_reqs)
        yield Group(1, 0, request, request, _first_seen(seq_lens - 1, left), seq_lens)
        return
    query_lens = starts.diff()
    num_blocks = torch.where(query_lens < least_tokens, 0, (query_lens + (QUERY_BLOCK - 1)) // QUERY_BLOCK)
    request = torch.repeat_interleave(num_blocks)
    skipped = (torch.arange(len(request)) - (num_blocks.cumsum(0) - num_blocks)[request]) * QUERY_BLOCK
    seq_len, query_len = seq_lens[request], query_lens[request]
    length = (query_len - skipped).clamp(max=QUERY_BLOCK)
    position = seq_len - query_len + skipped
    stop = seq_len if right is None else torch.minimum(seq_len, position + length + right)
    keys_after = stop - position - length
    blocks = Group(0, 0, request, starts[request] + skipped, _first_seen(position, left), stop)
    for length_, keys_after_ in torch.stack((length, keys_after)).unique(dim=1).T.tolist():
        members = blocks.pick((length == length_) & (keys_after == keys_after_))
        yield Group(length_, keys_after_, members.request, members.row, members.start, members.stop)


def _first_seen(position: torch.Tensor, left: int | None) -> torch.Tensor:
    return torch.zeros_like(position) if left is None else (position - left).clamp(min=0)


def _chunks(
    group: Group,
    num_keys: list[int],
    block_table: torch.Tensor,
    left: int | None,
    right: int | None,
    cache: Geometry,
    token_bytes: int,
) -> Iterator[Chunk]:
    longest = max(num_keys)
    if len(num_keys) > _fitting(longest, group.length, token_bytes):
        # The blocks with the most keys come first, so that the blocks of a chunk need little padding.
        order = torch.argsort(group.start - group.stop, stable=True)
        group, num_keys = group.pick(order), sorted(num_keys, reverse=True)
    mask = _mask(group, longest, left, right)
    for part in _parts(num_keys, group.length, token_bytes):
        members = group if part.stop - part.start == len(num_keys) else group.pick(part)
        most = max(num_keys[part])
        aligned = members.stop[:, None] + torch.arange(-most, 0)
        bias = None if mask is None else mask[..., longest - most :]
        padded = min(num_keys[part]) < most
        if padded:
            before = (aligned < members.start[:, None])[:, None, None, None]
            bias = torch.where(before, -math.inf, _ZERO if bias is None else bias)
            aligned = torch.maximum(aligned, members.start[:, None])
        rows, tokens = members.rows(), _tokens(block_table, members.request, aligned, cache)
        for heads in _heads(cache.num_kv_heads, most * token_bytes):
            steps = torch.arange(heads.start, heads.stop)[:, None] * cache.head_step
            index = (tokens + steps).flatten()
            yield Chunk(rows, heads, len(members.row), group.length, most, index, bias, group.keys_after)


def _parts(num_keys: list[int], length: int, token_bytes: int) -> Iterator[slice]:
    start = 0
    while start < len(num_keys):
        stop = min(start + _fitting(max(num_keys[start:]), length, token_bytes), len(num_keys))
        yield slice(start, stop)
        start = stop


def _fitting(num_keys: int, length: int, token_bytes: int) -> int:
    """The number of blocks of a chunk: as many as stay within QUERY_BLOCK and CHUNK_BYTES, but at least one."""
    return max(1, min(QUERY_BLOCK // length, CHUNK_BYTES // (num_keys * token_bytes)))


def _heads(num_kv_heads: int, block_bytes: int) -> Iterator[slice]:
    """Slices of the KV heads: all heads, or fewer if one block exceeds CHUNK_BYTES, but at least one per thread."""
    step = num_kv_heads
    if block_bytes > CHUNK_BYTES:
        step = max(torch.get_num_threads(), CHUNK_BYTES * num_kv_heads // block_bytes)
    for first in range(0, num_kv_heads, step):
        yield slice(first, min(first + step, num_kv_heads))


def _mask(group: Group, num_keys: int, left: int | None, right: int | None) -> torch.Tensor | None:
    """The mask, fp32 [1, 1, 1, length, num_keys], −inf for keys that a row does not see. None if each row sees all."""
    if group.length == 1:
        # A block has only keys that some row of it sees, and this block has one row.
        return None
    distance = _distance(group.length, num_keys, group.keys_after)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance < -left
    if right is not None:
        hidden |= distance > right
    return torch.where(hidden, -math.inf, _ZERO)[None, None, None] if hidden.any() else None


def _distance(length: int, num_keys: int, keys_after: int) -> torch.Tensor:
    return torch.arange(1 - num_keys, 1) + torch.arange(keys_after + length - 1, keys_after - 1, -1)[:, None]


def _tokens(block_table: torch.Tensor, request: torch.Tensor, position: torch.Tensor, cache: Geometry) -> torch.Tensor:
    """The rows of the cache for the first head, int64 [num_blocks, 1, num_keys]. position: [num_blocks, num_keys]."""
    page = block_table[request[:, None], position // cache.block_size].long()
    return (page * cache.block_step + position % cache.block_size * cache.slot_step)[:, None]
