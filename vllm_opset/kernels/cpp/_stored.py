"""Quantised weights that C++ multiplies as they are stored (_stored.h), and which weights it can multiply so."""

import ctypes

import torch

from vllm_opset.kernels.cpp._build import INT, POINTER
from vllm_opset.kernels.cpp._types import LANES, TYPES
from vllm_opset.ops.schemes import (
    FP4,
    FP8,
    INT8,
    PACKED,
    UINT4,
    UINT4_BLOCK,
    WHOLE,
    group_of,
    is_mxfp4,
    unpacked,
    values_shape,
)

PLAIN = 0
FORMATS = {FP8: 1, INT8: 2, UINT4: 3, FP4: 4}  # as in _stored.h
# Scales of fp8 are multiplied by 2^120, and must stay finite.
LARGEST_FP8_SCALE = 2.0**7


class Weight(ctypes.Structure):
    """A weight as _stored.h describes it."""

    _fields_ = [
        ("values", POINTER),
        ("scales", POINTER),
        ("zero_points", POINTER),
        ("format", INT),
        ("scale_type", INT),
        ("scale_rows", INT),
        ("scale_columns", INT),
    ]


def can_stay(weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether C++ can multiply a quantised weight as it is stored. It can, but for unusual values and groups.

    fp8 with NaN, or with scales of 128 and more, is dequantised once instead, because testing each value takes time. So
    is int4 in groups of less than UINT4_BLOCK columns, whose values would have several scales where they are unpacked.
    """
    if is_mxfp4(weight, scale):
        return True
    if scale.dtype not in TYPES:
        return False
    if weight.dtype is PACKED:
        group = group_of(values_shape(weight)[-2:], scale.shape[-2:])
        return group.columns == WHOLE or group.columns >= UINT4_BLOCK
    if weight.dtype is not FP8:
        return True
    has_nan = bool((weight.view(torch.uint8) & 127 == 127).any())
    return not has_nan and bool((scale.abs() < LARGEST_FP8_SCALE).all())


def panels(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, in] as panels [out / LANES, in / 2, LANES, 2] of rows side by side, in a tensor of its shape."""
    return weight.unflatten(0, (-1, LANES)).unflatten(2, (-1, 2)).transpose(1, 2).contiguous().view(weight.shape)


def stored_panels(weight: torch.Tensor) -> torch.Tensor:
    """A quantised weight in panels. Two values share a byte if one is as many places after the other in them as bytes
    are loaded at a time.
    """
    if weight.dtype is not PACKED:
        return panels(weight.view(torch.uint8)).view(weight.dtype)
    low, high = panels(unpacked(weight, UINT4)).view(-1, 2, 2 * LANES).unbind(1)
    return (low | high << 4).view(weight.shape)


def is_stored(weight: torch.Tensor) -> bool:
    """Whether a weight that was prepared is still quantised."""
    return weight.dtype not in TYPES


def described(
    weight: torch.Tensor, scale: torch.Tensor | None = None, zero_point: torch.Tensor | None = None
) -> Weight:
    """The description of a contiguous weight, quantised or not, which must outlive it."""
    if not is_stored(weight):
        return Weight(weight.data_ptr(), None, None, PLAIN)
    of_bytes = FP4 if is_mxfp4(weight, scale) else UINT4
    dtype = of_bytes if weight.dtype is PACKED else weight.dtype
    scale, zero_point = scale.contiguous(), None if zero_point is None else zero_point.contiguous()
    found = Weight(
        weight.data_ptr(), scale.data_ptr(), None if zero_point is None else zero_point.data_ptr(), FORMATS[dtype],
        TYPES.get(scale.dtype, 0), *scale.shape[-2:],
    )  # fmt: skip
    found.tensors = scale, zero_point  # which may be copies that nothing else holds
    return found
