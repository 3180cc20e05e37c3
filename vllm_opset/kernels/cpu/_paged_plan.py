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

from vllm_opset.ops.paged_batch import PagedBatch

# Rows of a prompt that are attended at a time. With more, more time goes to keys that only the last of them see; with
# fewer, the same keys are gathered more often.
QUERY_BLOCK = 256
# Bytes of keys and values that are gathered at a time: half of the second-level cache of a server's core.
CHUNK_BYTES = 1 << 20

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

    rows: of query and out, num_blocks * length of them. index: cache rows of [num_blocks, num_kv_heads, num_keys].
    bias: fp32, zero or −inf, broadcasts to [num_blocks, 1, length, num_keys]; None if every row sees every key.
    distance: fp32 [length, num_keys], key position − query position. triangular: whether every block is the start of
    a prompt, so that `bias` is no more than the causal mask.
    """

    rows: slice | torch.Tensor
    num_blocks: int
    length: int
    num_keys: int
    index: torch.Tensor
    bias: torch.Tensor | None
    distance: torch.Tensor
    triangular: bool


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
        first = int(self.row[0])
        if len(self.row) == 1 or (self.row.diff() == self.length).all():
            return slice(first, first + len(self.row) * self.length)
        return (self.row[:, None] + torch.arange(self.length)).flatten()


def make_plan(batch: PagedBatch, left: int | None, right: int | None, cache: Geometry, token_bytes: int) -> Plan:
    """left, right: see window_sides. token_bytes: what the keys and values of a token take in the cache."""
    plan = Plan([], [])
    for group in _groups(batch, left, right):
        num_keys = group.stop - group.start
        if num_keys.min() <= 0:
            plan.blind_rows.append(group.pick(num_keys <= 0).rows())
            group = group.pick(num_keys > 0)
        plan.chunks.extend(_chunks(group, batch.block_table, left, right, cache, token_bytes))
    return plan


def _groups(batch: PagedBatch, left: int | None, right: int | None) -> Iterator[Group]:
    starts, seq_lens = batch.query_start_loc, batch.seq_lens
    query_lens = starts.diff()
    if batch.max_query_len == 1 and query_lens.all():
        request, row, stop = torch.arange(len(seq_lens)), starts[:-1], seq_lens
        yield Group(1, 0, request, row, _first_seen(stop - 1, left), stop)
        return
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
    group: Group, block_table: torch.Tensor, left: int | None, right: int | None, cache: Geometry, token_bytes: int
) -> Iterator[Chunk]:
    num_keys = (group.stop - group.start).tolist()
    longest = max(num_keys, default=0)
    if len(num_keys) * longest * token_bytes > CHUNK_BYTES:
        # The blocks with the most keys first, so that little is padded.
        group, num_keys = group.pick(torch.argsort(group.start - group.stop)), sorted(num_keys, reverse=True)
    distance = torch.arange(1 - longest, 1) + torch.arange(group.ahead + group.length - 1, group.ahead - 1, -1)[:, None]
    mask = _mask(distance, left, right)
    for part in _parts(num_keys, token_bytes):
        members, most = group.pick(part), max(num_keys[part])
        aligned = members.stop[:, None] + torch.arange(-most, 0)
        bias = None if mask is None else mask[:, longest - most :]
        padded = min(num_keys[part]) < most
        if padded:
            before = (aligned < members.start[:, None])[:, None, None]
            bias = torch.where(before, -math.inf, _ZERO if bias is None else bias)
            aligned = torch.maximum(aligned, members.start[:, None])
        yield Chunk(
            rows=members.rows(),
            num_blocks=len(members.row),
            length=group.length,
            num_keys=most,
            index=_rows_of_tokens(block_table, members.request, aligned, cache),
            bias=bias,
            distance=distance[:, longest - most :],
            triangular=not padded and most == group.length and group.ahead == 0 and right == 0 and left is None,
        )


def _parts(num_keys: list[int], token_bytes: int) -> Iterator[slice]:
    """Slices of the blocks, so that the keys and values of each fit CHUNK_BYTES, or there is but one block in it."""
    start = 0
    while start < len(num_keys):
        stop = start + max(1, CHUNK_BYTES // (max(num_keys[start:]) * token_bytes))
        yield slice(start, stop)
        start = stop


def _mask(distance: torch.Tensor, left: int | None, right: int | None) -> torch.Tensor | None:
    """fp32, −inf where a key is not seen. None if all are: all keys of a block are seen by one of its rows at least."""
    if len(distance) == 1:
        return None
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance < -left
    if right is not None:
        hidden |= distance > right
    return torch.where(hidden, -math.inf, _ZERO) if hidden.any() else None


def _rows_of_tokens(
    block_table: torch.Tensor, request: torch.Tensor, position: torch.Tensor, cache: Geometry
) -> torch.Tensor:
    """Of the cache: [num_blocks * num_kv_heads * num_keys]. position: [num_blocks, num_keys]."""
    page = block_table[request[:, None], position // cache.block_size].long()
    row = page * cache.block_step + position % cache.block_size * cache.slot_step
    heads = torch.arange(cache.num_kv_heads) * cache.head_step
    return (row[:, None] + heads[:, None]).flatten()
