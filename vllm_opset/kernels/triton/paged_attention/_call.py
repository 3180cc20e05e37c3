"""A call of paged_attention: its arguments, its sizes, and how they are cut into tiles."""

from dataclasses import dataclass, field

import torch

from vllm_opset.kernels.triton import _launch
from vllm_opset.ops.attention.paged_batch import PagedBatch

MIN_ROWS, MIN_COLUMNS = 16, 16  # of a tile: a matrix instruction takes so many
MAX_ROWS_FP32 = 32  # without tensor cores, products are unrolled: more rows compile for minutes
# Of a query or key. Tiles of longer ones have fewer rows and keys than the launch table says. Those of prefill_sm90
# have at least 64 keys.
ROW_BYTES = 256
WARPGROUP = 4  # warps
STATS = 2  # numbers for each row of a partial result: m_i and l_i


@dataclass(eq=False)
class Call:
    """The arguments as the op takes them, with the two sides of the window.

    block_d: the columns of a tile. most_rows: of a request's queries.
    """

    query: torch.Tensor
    kv_cache: torch.Tensor
    batch: PagedBatch
    out: torch.Tensor
    scale: float
    left: int | None
    right: int | None
    soft_cap: float
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    num_kv_heads: int = field(init=False)
    block_size: int = field(init=False)
    head_size: int = field(init=False)
    block_d: int = field(init=False)
    group: int = field(init=False)
    num_reqs: int = field(init=False)
    most_rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_kv_heads, self.block_size = self.kv_cache.shape[1:3]
        self.head_size = self.query.shape[2]
        self.block_d = tile_columns(self.head_size)
        self.group = self.query.shape[1] // self.num_kv_heads
        self.num_reqs = self.batch.seq_lens.shape[0]  # len(seq_lens) takes PyTorch several times as long
        self.most_rows = self.batch.max_query_len * self.group

    def block_n(self, values: _launch.Parameters) -> int:
        """The keys of a tile."""
        return max(MIN_ROWS, values["keys"] * ROW_BYTES // max(ROW_BYTES, self.row_bytes))

    @property
    def caches_fp8(self) -> bool:
        return self.kv_cache.dtype != self.query.dtype

    @property
    def row_bytes(self) -> int:
        return self.block_d * self.query.element_size()

    def span(self, num_queries: int) -> int:
        """The most keys that so many consecutive queries see."""
        if self.left is None or self.right is None:
            return self.batch.max_seq_len
        return min(self.batch.max_seq_len, self.left + self.right + min(num_queries, self.batch.max_query_len))

    def attend_arguments(self) -> tuple:
        """The first arguments of the kernels that attend, but for prefill_sm90's."""
        query, cache, out, batch = self.query, self.kv_cache, self.out, self.batch
        return (
            query, query.stride(), cache, cache.stride(), out, out.stride(),
            batch.query_start_loc, batch.seq_lens, batch.block_table, batch.block_table.stride(), self.num_reqs,
            self.scale, self.soft_cap or None, self.alibi_slopes, self.sinks, self.k_scale, self.v_scale,
        )  # fmt: skip

    def combine_arguments(self) -> tuple:
        """The first arguments of the kernels that combine partial results."""
        out, batch = self.out, self.batch
        return (out, out.stride(), batch.query_start_loc, batch.seq_lens, self.num_reqs, self.sinks, self.v_scale)


def tile_columns(head_size: int) -> int:
    """The columns of a tile: a power of two that holds a head."""
    return _launch.next_power_of_2(max(MIN_COLUMNS, head_size))


def tile_rows(wanted: int, group: int, dtype: torch.dtype) -> int:
    """The rows of a query tile: a power of two that holds at least one token."""
    if dtype == torch.float32:
        wanted = min(wanted, MAX_ROWS_FP32)
    return _launch.next_power_of_2(max(MIN_ROWS, group, wanted))


def workspace(batch: PagedBatch, num_partials: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial results, with m_i and l_i of their rows. The layers of a step use it one after the other."""
    device = batch.seq_lens.device
    partials = torch.empty(num_partials, rows, columns, dtype=torch.float32, device=device)
    return partials, torch.empty(num_partials, rows, STATS, dtype=torch.float32, device=device)


def tickets(batch: PagedBatch, num_tiles: int) -> torch.Tensor:
    """Counters of the partial results that are stored. Each layer of a step leaves them at zero for the next one."""
    return torch.zeros(num_tiles, dtype=torch.int32, device=batch.seq_lens.device)


def thresholds(device: torch.device) -> _launch.Parameters:
    """The sizes at which variants change, from the launch table."""
    return _launch.parameters("paged_attention", device, 0)
