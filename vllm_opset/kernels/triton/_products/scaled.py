"""Weights in fp8 and int8, and activations in the same dtype: products of tiles, and the layout of their scales.

Tensor cores multiply int8 by int8 on all targets, and fp8 by fp8 on those that can. On others, fp8 is widened to fp16,
which holds every value of e4m3. A weight is widened to the dtype of activations that are not quantised.
"""

import torch
import triton
import triton.language as tl

from vllm_opset.ops.contract import Problem
from vllm_opset.ops.schemes import FP8, INT8, WHOLE, Quantised, group_of

# The fewest columns of 8 bits that tensor cores multiply at a time.
LEAST_COLUMNS = 32
TO_FP32 = tl.constexpr(2.0**120)  # The exponent of e4m3 has a bias of 7, and that of fp32 one of 127.


def supports(problem: Problem) -> str | None:
    """fp8 e4m3 and int8 weights, by activations as they are or in the same dtype; scales for 32 columns or more."""
    activation = problem.scheme.activation
    quantised: list[Quantised] = [*filter(None, (problem.scheme.weight, activation))]
    for stored in quantised:
        if stored.dtype not in (FP8, INT8):
            return f"it multiplies fp8 e4m3 and int8, not {stored}"
        if stored.dtype is not quantised[0].dtype:
            return f"both factors must be stored in the same dtype, not in {problem.scheme}"
        if stored.group.columns != WHOLE and stored.group.columns < LEAST_COLUMNS:
            return f"a tile has {LEAST_COLUMNS} columns of one scale, and here {stored} has fewer"
    if activation is not None and activation.group.rows not in (1, WHOLE):
        return f"scales belong to one token or to all, and here to {activation.group.rows}"
    return None


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """An fp8 tensor as bytes: not every target's compiler knows the type, and the interpreter has no zero of it."""
    return tensor.view(torch.uint8) if tensor.dtype is FP8 else tensor


def scale_group(tensor: torch.Tensor, scale: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The rows and columns that share a scale, and the strides from scale to scale: 0 where there is one scale."""
    group = group_of(tensor.shape, scale.shape)
    extents = (max(size, 1) if of == WHOLE else of for of, size in zip(group, tensor.shape, strict=True))
    strides = (0 if size == 1 else stride for size, stride in zip(scale.shape, scale.stride(), strict=True))
    return tuple(extents), tuple(strides)


@triton.jit
def _widened(bits, dtype: tl.constexpr):
    """The values of e4m3 bytes in `dtype`, by way of fp32: it has 4 more bits of exponent and 20 more of mantissa."""
    # The extended sign also fills the 4 bits, which are cleared. Subnormal values are subnormal in fp32 too until they
    # are multiplied, and Triton does not flush them.
    single = (bits.to(tl.int8, bitcast=True).to(tl.int32) << 20) & ~0x78000000
    value = single.to(tl.float32, bitcast=True) * TO_FP32
    # NaN's bits would be 480, and those of no other value are.
    return tl.where(tl.abs(value) == 480.0, float("nan"), value).to(dtype)


@triton.jit
def product_of(a, b, QUANTISED: tl.constexpr, NATIVE: tl.constexpr):
    """The product of stored values, in fp32. fp8 comes as bytes."""
    if b.dtype == tl.int8:
        if QUANTISED:
            product = tl.dot(a, b, out_dtype=tl.int32).to(tl.float32)
        else:  # by way of fp32, which the interpreter converts to bf16
            product = tl.dot(a, b.to(tl.float32).to(a.dtype), input_precision="ieee")
    elif NATIVE:
        product = tl.dot(a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True))
    elif QUANTISED:
        product = tl.dot(_widened(a, tl.float16), _widened(b, tl.float16), input_precision="ieee")
    else:
        product = tl.dot(a, _widened(b, a.dtype), input_precision="ieee")
    return product
