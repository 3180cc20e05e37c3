"""permute: a program for each expert finds the expert's choices and writes its blocks.

Each program needs the number of choices of the experts before its own. Few choices are counted by every program. Many
are counted once, a chunk in a program of another kernel. Nobody reads a number back from the device.

The size of blocks is no constant of the kernels: what is compiled depends on the number of choices alone, and the size
of blocks on their number for each expert. So a warm-up over powers of two reaches all (`model/experts.py`).
"""

import torch
import triton
import triton.language as tl

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.ops.moe.permute import blocks_for, check_arguments

LEAST_BINS = 64  # a histogram has a bin for each thread of a warp, of which AMD's GPUs have 64
LEAST_CHUNK = 16
PLACES = 1024  # that a program fills with one store


@kernel(ops.permute, name="triton")
def permute(
    topk_ids: torch.Tensor, num_experts: int, block_size: int, expert_map: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    check_arguments(topk_ids, num_experts, block_size, expert_map)
    num_choices = topk_ids.numel()
    num_blocks = blocks_for(num_choices, num_experts, block_size)
    sorted_token_ids = topk_ids.new_empty(num_blocks * block_size)
    expert_ids = topk_ids.new_empty(num_blocks)
    if not num_choices:
        return sorted_token_ids, expert_ids
    values = _launch.parameters("permute", topk_ids.device, num_choices)
    chunk = min(values["chunk"], max(LEAST_CHUNK, _launch.next_power_of_2(num_choices)))
    num_chunks = _launch.cdiv(num_choices, chunk)
    launch = {
        "BINS": max(LEAST_BINS, _launch.next_power_of_2(num_experts + 1)), "CHUNK": chunk,
        "num_warps": values["warps"], **_launch.launch_options(topk_ids.device),
    }  # fmt: skip
    counts = None
    if num_chunks > 1:
        counts = topk_ids.new_empty((num_chunks, launch["BINS"]))
        _launch.launch(_count, (num_chunks,), topk_ids, expert_map, counts, num_choices, num_experts, **launch)
    _launch.launch(
        _place, (num_experts + 1,),  # the last program fills the empty blocks
        topk_ids, expert_map, counts, sorted_token_ids, expert_ids, num_choices, num_chunks, num_blocks, num_experts,
        block_size, PLACES=PLACES, **launch,
    )  # fmt: skip
    return sorted_token_ids, expert_ids


@triton.jit
def place_of(topk_ids, expert_map, choice, is_choice):
    """The places of the choices' experts among those that are here; below 0 for others, and without is_choice."""
    place = tl.load(topk_ids + choice, is_choice, -1)
    if expert_map is not None:
        place = tl.where(place < 0, -1, tl.load(expert_map + place, place >= 0, -1).to(tl.int32))
    return place


@triton.jit
def _experts(topk_ids, expert_map, choice, num_choices, num_experts):
    """The experts of choices: num_experts for those that are not here, and beyond the last choice."""
    expert = place_of(topk_ids, expert_map, choice, choice < num_choices)
    return tl.where(expert < 0, num_experts, expert)


@triton.jit(do_not_specialize=["num_choices", "num_experts"])
def _count(
    topk_ids, expert_map, counts, num_choices, num_experts,
    BINS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    choice = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    found = tl.histogram(_experts(topk_ids, expert_map, choice, num_choices, num_experts), BINS)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), found)


@triton.jit(do_not_specialize=["num_choices", "num_chunks", "num_blocks", "num_experts", "block_size"])
def _place(
    topk_ids, expert_map, counts, sorted_token_ids, expert_ids, num_choices, num_chunks, num_blocks, num_experts,
    block_size, BINS: tl.constexpr, CHUNK: tl.constexpr, PLACES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    own, lane, bin = tl.program_id(0), tl.arange(0, CHUNK), tl.arange(0, BINS)
    if counts is None:
        found = tl.histogram(_experts(topk_ids, expert_map, lane, num_choices, num_experts), BINS)
    else:
        found = tl.zeros([BINS], tl.int32)
        for chunk in tl.range(0, num_chunks):
            found += tl.load(counts + chunk * BINS + bin)
    blocks = (found + block_size - 1) // block_size
    first_block = tl.sum(tl.where(bin < own, blocks, 0))
    last_block = first_block + tl.sum(tl.where(bin == own, blocks, 0))
    if own == num_experts:
        last_block = num_blocks
    place = first_block * block_size
    for first in tl.range(0, tl.where(own < num_experts, num_choices, 0), CHUNK):
        choice = first + lane
        is_own = (_experts(topk_ids, expert_map, choice, num_choices, num_experts) == own).to(tl.int32)
        rank = tl.cumsum(is_own, 0) - is_own
        tl.store(sorted_token_ids + place + rank, choice, is_own != 0)
        place += tl.sum(is_own)
    slot = tl.arange(0, PLACES)
    for first in tl.range(place, last_block * block_size, PLACES):
        tl.store(sorted_token_ids + first + slot, num_choices, first + slot < last_block * block_size)
    expert = tl.where(own < num_experts, own, -1)
    for first in tl.range(first_block, last_block, PLACES):
        tl.store(expert_ids + first + slot, expert, first + slot < last_block)
