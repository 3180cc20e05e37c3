"""Attention heads as blocks of pairs: what every kernel that rotates queries and keys shares.

A program takes one token and a group of its heads: so many of the query and, beside them, a share of the key's. All
that it reads is loaded before anything is stored, so that the loads are in flight together.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_opset.kernels.triton._rows import warps


class Heads(NamedTuple):
    """Where element c of head h of token t lies: at t * token + h * head + c * column."""

    token: int
    head: int
    column: int


def heads(x: torch.Tensor | None, head_size: int) -> Heads | None:
    """Of an x [T, H * head_size] or [T, H, head_size], any strides; None of None."""
    if x is None:
        return None
    return Heads(x.stride(0), x.stride(1) if x.dim() == 3 else head_size * x.stride(1), x.stride(-1))


def num_heads(x: torch.Tensor | None, head_size: int) -> int:
    """How many heads there are in an x [T, H * head_size] or [T, H, head_size]; 0 in None."""
    return 0 if x is None else math.prod(x.shape[1:]) // head_size


def grouped(
    query: torch.Tensor, key: torch.Tensor | None, head_size: int, rotary_dim: int, heads: int, per_thread: int
) -> dict[str, int]:
    """Launch arguments of a kernel whose programs take up to `heads` heads of a query, and a share of the key's."""
    of_query, of_key = num_heads(query, head_size), num_heads(key, head_size)
    held = min(heads, triton.next_power_of_2(of_query))
    groups = triton.cdiv(of_query, held)
    held_of_key = triton.next_power_of_2(triton.cdiv(of_key, groups))
    return {
        "NUM_HEADS": of_query, "NUM_KV_HEADS": of_key, "GROUPS": groups, "HEADS": held, "KV_HEADS": held_of_key,
        "PAIRS": rotary_dim // 2, "PAIR_BLOCK": triton.next_power_of_2(rotary_dim // 2),
        "REST": head_size - rotary_dim, "REST_BLOCK": triton.next_power_of_2(head_size - rotary_dim),
        "num_warps": warps((held + held_of_key) * triton.next_power_of_2(head_size), per_thread),
    }  # fmt: skip


@triton.jit
def load_angles(table, table_strides, position, PAIRS: tl.constexpr, PAIR_BLOCK: tl.constexpr):
    """A token's cosines and sines, [1, PAIR_BLOCK] each, in fp32."""
    pair = tl.arange(0, PAIR_BLOCK)[None, :]
    table += position.to(tl.int64) * table_strides[0]
    cos = tl.load(table + pair * table_strides[1], pair < PAIRS, 0.0)
    sin = tl.load(table + (PAIRS + pair) * table_strides[1], pair < PAIRS, 0.0)
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def load_pairs(start, column, mask, PAIRS: tl.constexpr, PAIR_BLOCK: tl.constexpr, NEOX: tl.constexpr):
    """First and second elements of the pairs of heads that begin at `start` [HEADS, 1], as they are stored."""
    pair = tl.arange(0, PAIR_BLOCK)[None, :]
    mask = mask & (pair < PAIRS)
    if NEOX:
        first = tl.load(start + pair * column, mask, 0.0)
        second = tl.load(start + (PAIRS + pair) * column, mask, 0.0)
    else:
        both = 2 * pair[:, :, None] + tl.arange(0, 2)[None, None, :]
        first, second = tl.split(tl.load(start[:, :, None] + both * column, mask[:, :, None], 0.0))
    return first, second


@triton.jit
def store_pairs(start, column, mask, first, second, PAIRS: tl.constexpr, PAIR_BLOCK: tl.constexpr, NEOX: tl.constexpr):
    """The inverse of `load_pairs`, rounded to the format of what `start` points to."""
    pair = tl.arange(0, PAIR_BLOCK)[None, :]
    mask = mask & (pair < PAIRS)
    first, second = first.to(start.dtype.element_ty), second.to(start.dtype.element_ty)
    if NEOX:
        tl.store(start + pair * column, first, mask)
        tl.store(start + (PAIRS + pair) * column, second, mask)
    else:
        both = 2 * pair[:, :, None] + tl.arange(0, 2)[None, None, :]
        tl.store(start[:, :, None] + both * column, tl.join(first, second), mask[:, :, None])


@triton.jit
def rotate(first, second, cos, sin):
    """Pairs turned by their angles, in fp32."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin
