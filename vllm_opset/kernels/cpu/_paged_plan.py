"""How a batch is attended on a CPU: cut into chunks, each of which takes one gather and one attention.

A request's query tokens are cut into blocks of at most QUERY_BLOCK rows, as if the scheduler had chunked its prompt:
a block needs the keys that one of its rows sees. Blocks of equal length form a group: decoding requests are one group
whatever else is in the batch, and no query row is padding. The blocks of a group are attended in chunks whose keys and
values fit the cache of a core. The last keys of all blocks of a chunk are aligned. So the distance between query row i
and key j is the same in all of them, and one mask, of which the chunks of a group take what they need, says for all who
sees what. A block with fewer keys than others has padding before them, which repeats its first key: what it may not
read, it does not read.

All this is arithmetic on whole batches, done once a step and shared by the layers.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_opset.ops.attention.paged_batch import PagedBatch

# Query rows that are attended at a time. With more, more time goes to keys that only some of them see; with fewer, the
# same keys are gathered more often.
QUERY_BLOCK = 256
# Bytes of keys and values that are gathered at a time. Less stays closer to the core, but takes more calls; beyond
# 32 MiB the C library would map the memory anew for every layer.
CHUNK_BYTES = 2 << 20

_ZERO = torch.zeros((), dtype=torch.float32)


class Geometry(NamedTuple):
    """A cache as rows, each a token's key and value of one head, and how many rows lie between its parts."""

    num_rows: int
    row_stride: int
    num_kv_heads: int
    block_size: int
    block_step: int
    head_step: int
    slot_step: int

    def rows_of(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """[num_rows, 2 * head_size], a view. Where the cache has gaps, its rows may overlap."""
        return kv_cache.as_strided((self.num_rows, kv_cache.shape[3]), (self.row_stride, kv_cache.stride(3)))


@functools.cache
def geometry(shape: tuple[int, ...], strides: tuple[int, ...]) -> Geometry:
    """Of a cache [num_blocks, num_kv_heads, block_size, 2 * head_size], whatever the order of its strides."""
    _, num_kv_heads, block_size, width = shape
    extents = [(size - 1) * stride for size, stride in zip(shape[:3], strides[:3], strict=True)]
    unit = math.gcd(*(stride for extent, stride in zip(extents, strides[:3], strict=True) if extent)) or width
    return Geometry(
        1 + sum(extents) // unit, unit, num_kv_heads, block_size, *(stride // unit for stride in strides[:3])
    )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks of equal length, attended together.

    rows: of query and out, num_blocks * length of them. heads: KV heads, all or those that fit. index: cache rows of
    [num_blocks, heads, num_keys]. bias: fp32, zero or −inf, broadcasts to [num_blocks, heads, query heads of a KV head,
    length, num_keys]; None if every row sees every key. ahead: keys after the last row of a block.
    """

    rows: slice | torch.Tensor
    heads: slice
    num_blocks: int
    length: int
    num_keys: int
    index: torch.Tensor
    bias: torch.Tensor | None
    ahead: int

    def distance(self) -> torch.Tensor:
        """[length, num_keys], key position − query position."""
        return _distance(self.length, self.num_keys, self.ahead)


@dataclass(frozen=True, slots=True)
class Plan:
    """blind_rows: of out, those that see no key."""

    chunks: list[Chunk]
    blind_rows: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks of `length` rows with `ahead` keys after the last of them; and for each, int tensors [num_blocks]: its
    request, its first row in the batch, and the keys that its rows see, from `start` to before `stop`."""

    length: int
    ahead: int
    request: torch.Tensor
    row: torch.Tensor
    start: torch.Tensor
    stop: torch.Tensor

    def pick(self, which: torch.Tensor | slice) -> "Group":
        tensors = (self.request, self.row, self.start, self.stop)
        return Group(self.length, self.ahead, *(tensor[which] for tensor in tensors))

    def rows(self) -> slice | torch.Tensor:
        """Of the batch: [num_blocks * length], as a slice where that will do."""
        first, *_ = rows = self.row.tolist()
        after = first + len(rows) * self.length
        if rows == list(range(first, after, self.length)):
            return slice(first, after)
        return (self.row[:, None] + torch.arange(self.length)).flatten()


def make_plan(batch: PagedBatch, left: int | None, right: int | None, cache: Geometry, token_bytes: int) -> Plan:
    """left, right: see window_sides. token_bytes: what the keys and values of a token take in the cache."""
    plan = Plan([], [])
    for group in _groups(batch, left, right):
        num_keys = (group.stop - group.start).tolist()
        if min(num_keys) <= 0:
            plan.blind_rows.append(group.pick(group.stop <= group.start).rows())
            group, num_keys = group.pick(group.stop > group.start), [number for number in num_keys if number > 0]
        if num_keys:
            plan.chunks.extend(_chunks(group, num_keys, batch.block_table, left, right, cache, token_bytes))
    return plan


def _groups(batch: PagedBatch, left: int | None, right: int | None) -> Iterator[Group]:
    starts, seq_lens = batch.query_start_loc, batch.seq_lens
    num_reqs = len(seq_lens)
    if batch.max_query_len == 1 and int(starts[num_reqs]) == num_reqs:
        request = torch.arange(num_reqs)
        yield Group(1, 0, request, request, _first_seen(seq_lens - 1, left), seq_lens)
        return
    query_lens = starts.diff()
    num_blocks = (query_lens + (QUERY_BLOCK - 1)) // QUERY_BLOCK
    request = torch.repeat_interleave(num_blocks)
    skipped = (torch.arange(len(request)) - (num_blocks.cumsum(0) - num_blocks)[request]) * QUERY_BLOCK
    seq_len, query_len = seq_lens[request], query_lens[request]
    length = (query_len - skipped).clamp(max=QUERY_BLOCK)
    position = seq_len - query_len + skipped
    stop = seq_len if right is None else torch.minimum(seq_len, position + length + right)
    ahead = stop - position - length
    blocks = Group(0, 0, request, starts[request] + skipped, _first_seen(position, left), stop)
    for length_, ahead_ in torch.stack((length, ahead)).unique(dim=1).T.tolist():
        members = blocks.pick((length == length_) & (ahead == ahead_))
        yield Group(length_, ahead_, members.request, members.row, members.start, members.stop)


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
        # The blocks with the most keys first, so that little is padded.
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
            yield Chunk(rows, heads, len(members.row), group.length, most, index, bias, group.ahead)


def _parts(num_keys: list[int], length: int, token_bytes: int) -> Iterator[slice]:
    start = 0
    while start < len(num_keys):
        stop = min(start + _fitting(max(num_keys[start:]), length, token_bytes), len(num_keys))
        yield slice(start, stop)
        start = stop


def _fitting(num_keys: int, length: int, token_bytes: int) -> int:
    """How many blocks make a chunk: one, or as many as stay within QUERY_BLOCK and CHUNK_BYTES."""
    return max(1, min(QUERY_BLOCK // length, CHUNK_BYTES // (num_keys * token_bytes)))


def _heads(num_kv_heads: int, block_bytes: int) -> Iterator[slice]:
    """Slices of the heads: all, unless one block alone is more than CHUNK_BYTES; but one head for each thread."""
    step = num_kv_heads
    if block_bytes > CHUNK_BYTES:
        step = max(torch.get_num_threads(), CHUNK_BYTES * num_kv_heads // block_bytes)
    for first in range(0, num_kv_heads, step):
        yield slice(first, min(first + step, num_kv_heads))


def _mask(group: Group, num_keys: int, left: int | None, right: int | None) -> torch.Tensor | None:
    """fp32 [1, 1, 1, length, num_keys], −inf where a key is not seen. None if all are."""
    if group.length == 1:
        # A block has the keys that one of its rows sees.
        return None
    distance = _distance(group.length, num_keys, group.ahead)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance < -left
    if right is not None:
        hidden |= distance > right
    return torch.where(hidden, -math.inf, _ZERO)[None, None, None] if hidden.any() else None


def _distance(length: int, num_keys: int, ahead: int) -> torch.Tensor:
    return torch.arange(1 - num_keys, 1) + torch.arange(ahead + length - 1, ahead - 1, -1)[:, None]


def _tokens(block_table: torch.Tensor, request: torch.Tensor, position: torch.Tensor, cache: Geometry) -> torch.Tensor:
    """Rows of the cache for the first head, int64 [num_blocks, 1, num_keys]. position: [num_blocks, num_keys]."""
    page = block_table[request[:, None], position // cache.block_size].long()
    return (page * cache.block_step + position % cache.block_size * cache.slot_step)[:, None]
