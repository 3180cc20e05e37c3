"""compute_slot_mapping: the slots of the paged KV cache for the keys and values of the new tokens.

Semantics: vLLM's `BlockTable.compute_slot_mapping` (vllm/v1/worker/block_table.py), without context parallelism.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from vllm_opset.ops import _samples
from vllm_opset.ops._strides import check_contiguous, check_rows
from vllm_opset.ops.contract import Cost, Problem, Sample, op

PADDING = -1
UNREAD = 2**30  # block table entries that must not be used; a slot computed from one would be noticed


@op(mutates=("slot_mapping",), dtypes=(torch.int64,))
def compute_slot_mapping(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    slot_mapping: torch.Tensor,
) -> None:
    """slot_mapping[t] = block_table[r, positions[t] // block_size] * block_size + positions[t] % block_size.

    query_start_loc: int32 [num_reqs + 1], from 0 to T. Request r has the tokens query_start_loc[r] … [r + 1] - 1, and
    may have none.

    positions: int64 [T], the positions of the tokens in their sequences.

    block_table: int32 [num_reqs or more, W], the blocks of the requests, any stride between rows.

    slot_mapping: int64 [T or more]. Entries from T on are padding and become −1.

    All others are contiguous. Raises ValueError if shapes, dtypes or strides do not fit.
    """
    check_arguments(query_start_loc, positions, block_table, slot_mapping)
    num_tokens, num_reqs = len(positions), len(query_start_loc) - 1
    request = torch.arange(num_reqs, device=positions.device).repeat_interleave(query_start_loc.long().diff())
    blocks = block_table[request, positions // block_size].long()
    slot_mapping[:num_tokens] = blocks * block_size + positions % block_size
    slot_mapping[num_tokens:] = PADDING


def check_arguments(
    query_start_loc: torch.Tensor, positions: torch.Tensor, block_table: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Refuses shapes, dtypes and strides that do not fit."""
    if len(block_table) < len(query_start_loc) - 1 or len(slot_mapping) < len(positions):
        raise ValueError(
            f"{len(query_start_loc) - 1} requests and {len(positions)} tokens do not fit a block_table of "
            f"{len(block_table)} rows and a slot_mapping of {len(slot_mapping)}"
        )
    if (query_start_loc.dtype, block_table.dtype) != (torch.int32, torch.int32):
        raise ValueError(f"query_start_loc is {query_start_loc.dtype} and block_table {block_table.dtype}, not int32")
    if (positions.dtype, slot_mapping.dtype) != (torch.int64, torch.int64):
        raise ValueError(f"positions are {positions.dtype} and slot_mapping {slot_mapping.dtype}, not int64")
    check_contiguous(query_start_loc=query_start_loc, positions=positions, slot_mapping=slot_mapping)
    check_rows("block_table", block_table)


@compute_slot_mapping.problem_of
def _(query_start_loc, positions, block_table, block_size, slot_mapping) -> Problem:
    return Problem(positions.device.type, positions.dtype)


@compute_slot_mapping.cost
def _(query_start_loc, positions, block_table, block_size, slot_mapping) -> Cost:
    """Reads positions, and each page of a request once, and writes slots."""
    request = torch.repeat_interleave(query_start_loc.long().diff())
    entries = (request * block_table.shape[1] + positions // block_size).unique()
    pages = entries.numel() * block_table.element_size()
    return Cost(bytes=query_start_loc.nbytes + positions.nbytes + pages + slot_mapping.nbytes, flops=0)


@dataclass(frozen=True)
class SlotCase:
    """One call.

    requests: (query_len, seq_len) of each request. padded_rows: unused rows of the block table. padding: unused slots.
    first_page: the lowest number of a page.
    """

    requests: tuple[tuple[int, int], ...]
    block_size: int = 16
    padded_rows: int = 0
    padding: int = 0
    first_page: int = 0

    def make(self, seed: str, device: str) -> tuple[tuple, dict]:
        """Arguments of the op, with pages in random order. Table entries that no token needs look like pages."""
        rng = _samples.generator(seed)
        starts, positions = [0], []
        for query_len, seq_len in self.requests:
            positions += range(seq_len - query_len, seq_len)
            starts.append(len(positions))
        width = max((-(-seq_len // self.block_size) for _, seq_len in self.requests), default=1)
        pages = torch.randperm(len(self.requests) * width, generator=rng).view(-1, width)
        table = torch.full((len(self.requests) + self.padded_rows, width + 3), UNREAD, dtype=torch.int32)
        table[: len(self.requests), :width] = pages + self.first_page
        slots = torch.full((len(positions) + self.padding,), UNREAD)
        tensors = torch.tensor(starts, dtype=torch.int32), torch.tensor(positions, dtype=torch.int64), table, slots
        query_start_loc, positions, table, slots = (tensor.to(device) for tensor in tensors)
        return (query_start_loc, positions, table, self.block_size, slots), {}


MIXED = ((1, 77), (3, 3), (0, 0), (19, 60), (1, 1), (6, 50))


@compute_slot_mapping.sample_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    for name, case in (
        ("zero tokens", SlotCase((), padding=3)),
        ("one token", SlotCase(((1, 1),))),
        ("decode", SlotCase(tuple((1, 1 + 7 * i) for i in range(40)))),
        ("a prompt", SlotCase(((1500, 1500),))),
        ("mixed", SlotCase(MIXED)),
        ("padded", SlotCase(MIXED, padded_rows=2, padding=1100)),
        ("block size 1", SlotCase(MIXED, block_size=1)),
        ("block size 48", SlotCase(MIXED, block_size=48)),
        ("slots beyond 32 bits", SlotCase(MIXED, first_page=2**28)),
        ("requests without tokens", SlotCase(((0, 0), (0, 0), (2, 9), (0, 0)))),
        ("many requests", SlotCase(tuple((i % 3, i % 3 + i % 50) for i in range(300)))),
    ):
        yield Sample(name, lambda name=name, case=case: case.make(name, device))


@compute_slot_mapping.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name: str, change: Callable[..., tuple]) -> Sample:
        return Sample(name, lambda: (change(*SlotCase(MIXED).make("illegal", device)[0]), {}))

    yield sample("more requests than rows", lambda q, p, table, size, slots: (q, p, table[:3], size, slots))
    yield sample("more tokens than slots", lambda q, p, table, size, slots: (q, p, table, size, slots[:3]))
    yield sample("an int64 table", lambda q, p, table, size, slots: (q, p, table.long(), size, slots))
    yield sample("strided positions", lambda q, p, table, size, slots: (q, p.repeat(2)[::2], table, size, slots))
    yield sample("strided slots", lambda q, p, table, size, slots: (q, p, table, size, slots.repeat(2)[::2]))
    yield sample("strided pages", lambda q, p, table, size, slots: (q, p, table.repeat(1, 2)[:, ::2], size, slots))
    yield sample("int32 slots", lambda q, p, table, size, slots: (q, p, table, size, slots.int()))


@compute_slot_mapping.bench_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    for name, requests in (
        ("decode B1", ((1, 1024),)),
        ("decode B256", ((1, 1024),) * 256),
        ("prefill 8192", ((8192, 8192),)),
    ):
        yield Sample(name, lambda requests=requests: SlotCase(requests, padding=256).make("bench", device))
