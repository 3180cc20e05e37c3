"""Weights of 4 bits: how they are packed in bytes, and what they stand for.

A weight [rows, columns] of values from 0 to 15 is stored as bytes [rows, columns / 2], and columns is a multiple of 32.
Byte 16 b + j of a row holds column 32 b + j in its low four bits, and column 32 b + 16 + j in its high ones. So both
halves of 16 bytes belong to 16 columns in a row, which a kernel can multiply by activations as they lie in memory.

A value q stands for (q - zero_point) * scale. Scales and zero points are matrices [rows, groups], whose shape says how
many columns share them. Without zero points, all are 8: values are then integers from -8 to 7.
"""

import torch

from vllm_opset.ops.schemes import UINT4, Quantised, expanded, group_of

# The dtype of packed weights. Zero points have it too, with a byte each.
PACKED = torch.uint8
# The columns that share 16 bytes.
BLOCK = 32
# The zero point of weights that have none of their own.
MIDDLE = 8


def packed(values: torch.Tensor) -> torch.Tensor:
    """Integers from 0 to 15, [rows, columns], as bytes [rows, columns / 2].

    Raises ValueError if columns is no multiple of 32.
    """
    rows, columns = values.shape
    if columns % BLOCK:
        raise ValueError(f"packed rows have a multiple of {BLOCK} columns, not {columns}")
    halves = values.to(PACKED).view(rows, -1, 2, BLOCK // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(rows, -1)


def unpacked(weight: torch.Tensor) -> torch.Tensor:
    """The values of a packed weight, uint8 [rows, columns]."""
    halves = weight.reshape(len(weight), weight.shape[1] * 2 // BLOCK, 1, BLOCK // 2)
    return torch.cat((halves & 15, halves >> 4), 2).reshape(len(weight), -1)


def quantised(weight: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None) -> Quantised:
    """How a packed weight with these scales is stored."""
    return Quantised(UINT4, group_of(shape_of(weight), scale), zero_point is not None)


def shape_of(weight: torch.Tensor) -> tuple[int, int]:
    """The rows and columns of a packed weight."""
    return weight.shape[0], weight.shape[1] * 2


def check(weight: torch.Tensor, scale: torch.Tensor | None, zero_point: torch.Tensor | None) -> None:
    """Raise ValueError for scales and zero points that are not of this packed weight."""
    if scale is None or scale.ndim != 2 or len(scale) != len(weight):
        raise ValueError(f"a packed weight {list(weight.shape)} needs scales for each of its rows")
    group_of(shape_of(weight), scale)
    if zero_point is not None and (zero_point.shape != scale.shape or zero_point.dtype is not PACKED):
        found = f"{zero_point.dtype} {list(zero_point.shape)}"
        raise ValueError(f"zero points must be {PACKED} {list(scale.shape)}, as the scales, not {found}")


def dequantise(
    weight: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The matrix that a packed one stands for. The product with the scale, in fp32 or fp64, is rounded once.

    Raises ValueError for scales or zero points that are not of this weight.
    """
    check(weight, scale, zero_point)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    values, shape = unpacked(weight).to(wide), shape_of(weight)
    values -= MIDDLE if zero_point is None else expanded(zero_point, shape).to(wide)
    return (values * expanded(scale, shape).to(wide)).to(dtype)
