"""Attention heads as blocks of pairs: code that all kernels share that rotate queries and keys.

A program takes one token and a group of its heads: some query heads and a share of the key heads. A block of heads is
three blocks of elements, (first, second, rest): the two elements of each pair, and the elements after the rotated part.
Kernels do all their loads before the first store, so that the loads are in flight together.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_opset.kernels.triton._launch import cdiv, next_power_of_2
from vllm_opset.kernels.triton._rows import EVICT_LAST, enough_warps


class Heads(NamedTuple):
    """The strides of a tensor of heads: element c of head h of token t is at t * token + h * head + c * column."""

    token: int
    head: int
    column: int


class Shape(NamedTuple):
    """The parts of a head: the number of pairs, the number of elements after them, and the order of the pairs.

    pair_block, rest_block: the numbers rounded up to a power of two.
    """

    pairs: int
    pair_block: int
    rest: int
    rest_block: int
    neox: bool

    @classmethod
    def of(cls, head_size: int, rotary_dim: int, is_neox_style: bool) -> "Shape":
        pairs, rest = rotary_dim // 2, head_size - rotary_dim
        return cls(pairs, next_power_of_2(pairs), rest, max(1, next_power_of_2(rest)), is_neox_style)


def heads(x: torch.Tensor | None, head_size: int) -> Heads | None:
    """The strides of x [T, H * head_size] or [T, H, head_size], any strides; None for None."""
    if x is None:
        return None
    return Heads(x.stride(0), x.stride(1) if x.dim() == 3 else head_size * x.stride(1), x.stride(-1))


def num_heads(x: torch.Tensor | None, head_size: int) -> int:
    """The number of heads in x [T, H * head_size] or [T, H, head_size]; 0 for None."""
    return 0 if x is None else math.prod(x.shape[1:]) // head_size


def grouped(query: torch.Tensor, key: torch.Tensor | None, head_size: int, heads: int, warps: int) -> dict[str, int]:
    """Launch arguments of a kernel whose programs take up to `heads` query heads each, and a share of the key heads."""
    of_query, of_key = num_heads(query, head_size), num_heads(key, head_size)
    held = min(heads, next_power_of_2(of_query))
    groups = cdiv(of_query, held)
    held_of_key = next_power_of_2(cdiv(of_key, groups))
    return {
        "NUM_HEADS": of_query, "NUM_KV_HEADS": of_key, "GROUPS": groups, "HEADS": held, "KV_HEADS": held_of_key,
        "num_warps": enough_warps(warps, (held + held_of_key) * next_power_of_2(head_size)),
    }  # fmt: skip


@triton.jit
def load_heads(start, column, mask, shape: tl.constexpr):
    """Loads the heads that begin at `start` [HEADS, 1], in their own dtype. mask: [HEADS, 1], the heads that exist."""
    if shape.neox:
        pair = tl.arange(0, shape.pair_block)[None, :]
        inside = mask & (pair < shape.pairs)
        first = tl.load(start + pair * column, inside, 0.0, eviction_policy=EVICT_LAST)
        second = tl.load(start + (shape.pairs + pair) * column, inside, 0.0, eviction_policy=EVICT_LAST)
    else:
        element = tl.arange(0, 2 * shape.pair_block)[None, :]
        inside = mask & (element < 2 * shape.pairs)
        both = tl.load(start + element * column, inside, 0.0, eviction_policy=EVICT_LAST)
        first, second = tl.split(tl.reshape(both, [start.shape[0], shape.pair_block, 2]))
    return first, second, load_rest(start, column, mask, shape)


@triton.jit
def load_rest(start, column, mask, shape: tl.constexpr):
    """Loads the elements after the pairs. If there are none, returns one column of zeros."""
    if shape.rest > 0:
        offset = tl.arange(0, shape.rest_block)[None, :]
        inside = mask & (offset < shape.rest)
        rest = tl.load(start + (2 * shape.pairs + offset) * column, inside, 0.0, eviction_policy=EVICT_LAST)
    else:
        rest = tl.where(mask, 0.0, 0.0)
    return rest


@triton.jit
def store_pairs(start, column, mask, first, second, shape: tl.constexpr):
    """Writes the pairs that `load_heads` reads, rounded to the dtype that `start` points to."""
    pair = tl.arange(0, shape.pair_block)[None, :]
    first, second = first.to(start.dtype.element_ty), second.to(start.dtype.element_ty)
    if shape.neox:
        tl.store(start + pair * column, first, mask & (pair < shape.pairs))
        tl.store(start + (shape.pairs + pair) * column, second, mask & (pair < shape.pairs))
    else:
        element = tl.arange(0, 2 * shape.pair_block)[None, :]
        both = tl.reshape(tl.join(first, second), [start.shape[0], 2 * shape.pair_block])
        tl.store(start + element * column, both, mask & (element < 2 * shape.pairs))


@triton.jit
def store_rest(start, column, mask, rest, shape: tl.constexpr):
    """Writes the elements that `load_rest` reads."""
    if shape.rest > 0:
        offset = tl.arange(0, shape.rest_block)[None, :]
        tl.store(start + (2 * shape.pairs + offset) * column, rest, mask & (offset < shape.rest))


@triton.jit
def load_angles(table, table_strides, position, mask, shape: tl.constexpr):
    """The cosines and sines of a position, in fp32, for each of the heads in `mask` [HEADS, 1].

    Each head loads them again, from the nearest cache. This is cheaper than distributing them over the threads.
    """
    pair = tl.broadcast_to(tl.arange(0, shape.pair_block)[None, :], [mask.shape[0], shape.pair_block])
    table += position.to(tl.int64) * table_strides[0]
    cos = tl.load(table + pair * table_strides[1], mask & (pair < shape.pairs), 0.0)
    sin = tl.load(table + (shape.pairs + pair) * table_strides[1], mask & (pair < shape.pairs), 0.0)
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def rotated(first, second, cos, sin):
    """The pairs rotated by their angles, in fp32."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def normalised(first, second, rest, weight, epsilon, weight_offset, shape: tl.constexpr):
    """rms_norm of each head, in fp32; `weight` points to [head_size] values."""
    first, second, rest = first.to(tl.float32), second.to(tl.float32), rest.to(tl.float32)
    squares = tl.sum(first * first + second * second, 1, keep_dims=True) + tl.sum(rest * rest, 1, keep_dims=True)
    scale = tl.rsqrt(squares / (2 * shape.pairs + shape.rest) + epsilon)
    start, mask = weight + tl.zeros([1, 1], tl.int32), tl.full([1, 1], True, tl.int1)
    w, x, y = load_heads(start, 1, mask, shape)
    first *= scale * (w.to(tl.float32) + weight_offset)
    second *= scale * (x.to(tl.float32) + weight_offset)
    return first, second, rest * scale * (y.to(tl.float32) + weight_offset)
