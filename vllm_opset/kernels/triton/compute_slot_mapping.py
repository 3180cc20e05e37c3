"""compute_slot_mapping: one program per request, and one that writes the padding."""

import torch
import triton
import triton.language as tl

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.ops.cache.compute_slot_mapping import PADDING, check_arguments

TILE = 1024  # tokens that a program maps at a time; any number is right


@kernel(ops.compute_slot_mapping, name="triton")
def compute_slot_mapping(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    slot_mapping: torch.Tensor,
) -> None:
    check_arguments(query_start_loc, positions, block_table, slot_mapping)
    _launch.launch(
        _compute_slot_mapping, (len(query_start_loc),),
        query_start_loc, positions, len(positions), block_table, block_table.stride(0), block_table.stride(1),
        slot_mapping, len(slot_mapping), BLOCK_SIZE=block_size, PADDING=PADDING, TILE=TILE,
        **_launch.launch_options(positions.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "row_stride", "num_slots"])
def _compute_slot_mapping(
    query_start_loc, positions, num_tokens, block_table, row_stride, column_stride, slot_mapping, num_slots,
    BLOCK_SIZE: tl.constexpr, PADDING: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    request = tl.program_id(0)
    if request == tl.num_programs(0) - 1:
        for first in range(num_tokens, num_slots, TILE):
            place = first + tl.arange(0, TILE)
            tl.store(slot_mapping + place, PADDING, place < num_slots)
        return
    row = block_table + request.to(tl.int64) * row_stride
    end = tl.load(query_start_loc + request + 1)
    for first in range(tl.load(query_start_loc + request), end, TILE):
        token = first + tl.arange(0, TILE)
        position = tl.load(positions + token, token < end, 0)
        block = tl.load(row + position // BLOCK_SIZE * column_stride, token < end, 0).to(tl.int64)
        tl.store(slot_mapping + token, block * BLOCK_SIZE + position % BLOCK_SIZE, token < end)
