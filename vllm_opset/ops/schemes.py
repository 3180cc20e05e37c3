"""The quantisation of weights and activations: how a tensor's values are stored, and which of them share a scale.

A stored value stands for `value * scale`. The scales of a matrix are a matrix too, whose shape says the granularity.

- [1, 1]: the whole matrix has one scale.
- [rows, 1]: each row has one. A row is a token of activations, or an output channel of a weight.
- [rows / 128, columns / 128]: each block of 128 x 128 has one.

Blocks have powers of two for sizes, and the last ones may be incomplete.

Two values of 4 bits are packed in a byte. Each row [columns] of them has columns / 2 bytes.

- MXFP4 (OCP Microscaling Formats, version 1.0): a byte holds two neighbouring values in e2m1, the first of them in its
  low bits. A byte of the scales is an exponent in e8m0: it stands for 2 to the power of the byte less 127, and 255 for
  NaN. Each scale belongs to 32 neighbouring values of a row.
- int4: values are from 0 to 15, and columns is a multiple of 32. Byte 16 b + j of a row holds column 32 b + j in its
  low bits, and column 32 b + 16 + j in its high ones. So both halves of 16 bytes belong to 16 columns in a row, which a
  kernel can multiply by activations as they lie in memory. A value stands for `(value - zero_point) * scale`. Zero
  points are bytes, a matrix of the scales' shape. Without them, all are 8, so values are integers from -8 to 7.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

FP8, INT8, FP4 = torch.float8_e4m3fn, torch.int8, torch.float4_e2m1fn_x2
UINT4 = torch.uint4  # PyTorch has no such tensors, only the name
# Tensors of two values a byte. Their scales are bytes for MXFP4, and floating-point numbers for int4.
PACKED = torch.uint8
UINT4_BLOCK = 32  # the columns of int4 values that are packed together
# How many columns the value in the high bits of a byte is after the one in the low bits.
DISTANCES = {FP4: 1, UINT4: UINT4_BLOCK // 2}
# The zero point of int4 weights that have none of their own.
MIDDLE = 8
CACHE_LINE, SCALE_PADDING = 128, 4  # bytes, and scales: 16 bytes, so that rows stay aligned as much
WHOLE = -1  # in place of a number of rows or columns that share a scale: all of them
# The magnitudes of e2m1, by its three low bits. The fourth bit is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NO_SCALE = 255  # NaN in e8m0
# The smallest scales of dynamic quantisation, so that zeros can be divided by them. They are vLLM's.
SMALLEST_SCALES = {FP8: 1 / (512 * 448), INT8: 1e-10 / 127}


class GroupShape(NamedTuple):
    """The numbers of rows and columns that share a scale, as vLLM writes them. WHOLE stands for all."""

    rows: int
    columns: int

    def __str__(self) -> str:
        known = {PER_TENSOR: "per tensor", PER_ROW: "per row"}
        return known.get(self) or "x".join("all" if size == WHOLE else str(size) for size in self)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The shape of the scales of a matrix."""
        rows, columns = shape
        return (
            1 if self.rows == WHOLE else -(-rows // self.rows),
            1 if self.columns == WHOLE else -(-columns // self.columns),
        )

    def new_scales(self, values: torch.Tensor, shape: tuple[int, ...], dtype=torch.float32) -> torch.Tensor:
        """Room for the scales of a matrix of this shape, on the device of `values`.

        Rows of a multiple of CACHE_LINE bytes are followed by SCALE_PADDING unused scales. A GPU then reads a column of
        scales faster, probably because its L1 cache has few places for lines that are so far apart.
        """
        rows, columns = self.scale_shape(shape)
        padding = SCALE_PADDING if columns * dtype.itemsize % CACHE_LINE == 0 else 0
        return values.new_empty((rows, columns + padding), dtype=dtype)[:, :columns]


PER_TENSOR = GroupShape(WHOLE, WHOLE)
PER_ROW = GroupShape(1, WHOLE)


@dataclass(frozen=True)
class Quantised:
    """How one tensor is stored. dtype: of its values. group: the values that share a scale, and a zero point if any."""

    dtype: torch.dtype
    group: GroupShape
    zero_point: bool = False

    def __str__(self) -> str:
        zero_point = " with zero points" if self.zero_point else ""
        return f"{str(self.dtype).removeprefix('torch.')} {self.group}{zero_point}"


@dataclass(frozen=True)
class Scheme:
    """How a layer's weight and its activations are stored. None: as they are, without scales."""

    weight: Quantised | None = None
    activation: Quantised | None = None

    def __str__(self) -> str:
        if self.weight is None:
            return "none"
        return f"{self.weight} by {self.activation or 'activations as they are'}"


NONE = Scheme()
MXFP4 = Quantised(FP4, GroupShape(1, 32))


def quantised(
    tensor: torch.Tensor, scale: torch.Tensor | None, zero_point: torch.Tensor | None = None
) -> Quantised | None:
    """How a tensor with this scale is stored. Raises ValueError for a scale of no granularity.

    It also raises for a zero point that is not of the scales of int4. Without packed values, there is none to check.
    """
    if scale is None:
        return None
    if tensor.dtype is not PACKED:
        return Quantised(tensor.dtype, group_of(tensor.shape, scale.shape))
    shape = values_shape(tensor)
    if is_mxfp4(tensor, scale):
        if shape[-1] % MXFP4.group.columns or tuple(scale.shape) != MXFP4.group.scale_shape(shape):
            raise ValueError(f"MXFP4 {list(shape)} has a scale for each 32 values of a row, not {list(scale.shape)}")
        if zero_point is not None:
            raise ValueError("MXFP4 has no zero points")
        return MXFP4
    group = group_of(shape, scale.shape)
    if len(scale) != len(tensor):
        raise ValueError(f"int4 {list(shape)} has scales for each of its rows, not {list(scale.shape)}")
    if zero_point is not None and (zero_point.shape != scale.shape or zero_point.dtype is not PACKED):
        found = f"{zero_point.dtype} {list(zero_point.shape)}"
        raise ValueError(f"zero points must be {PACKED} {list(scale.shape)}, as the scales, not {found}")
    return Quantised(UINT4, group, zero_point is not None)


def is_mxfp4(tensor: torch.Tensor, scale: torch.Tensor | None) -> bool:
    """Whether a tensor is stored as MXFP4: both it and its scales are bytes."""
    return scale is not None and tensor.dtype is PACKED and scale.dtype is torch.uint8


def values_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of the values that a tensor stands for, of which a byte holds two if they are packed."""
    return (*tensor.shape[:-1], 2 * tensor.shape[-1]) if tensor.dtype is PACKED else tuple(tensor.shape)


def packed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bits of values from 0 to 15, [..., columns], as bytes [..., columns / 2] in the order of FP4 or UINT4.

    Raises ValueError if columns is no multiple of 32 for UINT4, or of 2 for FP4.
    """
    distance = DISTANCES[dtype]
    if values.shape[-1] % (2 * distance):
        raise ValueError(f"packed rows have a multiple of {2 * distance} columns, not {values.shape[-1]}")
    low, high = values.to(PACKED).unflatten(-1, (-1, 2, distance)).unbind(-2)
    return (low | high << 4).flatten(-2)


def unpacked(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of a tensor that was `packed`, as bytes [..., columns]."""
    halves = tensor.unflatten(-1, (-1, 1, DISTANCES[dtype]))
    return torch.cat((halves & 15, halves >> 4), -2).flatten(-3)


def is_int4_group(columns: int | None) -> bool:
    """Whether so many columns of int4 weights may share a scale: WHOLE for all, or a power of two from 32 up."""
    return columns == WHOLE or (columns is not None and columns >= UINT4_BLOCK and not columns & (columns - 1))


def group_of(shape: tuple[int, ...], scales: tuple[int, ...]) -> GroupShape:
    """The values of a matrix of this shape that share a scale. scales: the shape of its scales.

    Raises ValueError for scales of no such granularity.
    """
    if len(scales) != len(shape):
        raise ValueError(f"the scale of {list(shape)} must be a matrix, not {list(scales)}")
    return GroupShape(*(_group_size(size, number) for size, number in zip(shape, scales, strict=True)))


def _group_size(size: int, scales: int) -> int:
    if scales == size != 1:
        return 1
    if scales == 1:
        return WHOLE
    # A number of groups above one has at most one size that is a power of two.
    group = 1 << (-(-size // scales) - 1).bit_length() if scales else 0
    if not group or -(-size // group) != scales:
        raise ValueError(f"{scales} scales along {size} values are no groups of a power of two")
    return group


def dequantise(
    tensor: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype, zero_point: torch.Tensor | None = None
) -> torch.Tensor:
    """The matrix that a stored one stands for. The product with the scale, in fp32 or fp64, is rounded once.

    Raises ValueError for scales and zero points that are not of this int4 tensor, since some would broadcast to it.
    """
    if scale is None:
        return tensor.to(dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    if is_mxfp4(tensor, scale):
        values = torch.tensor((*E2M1, *(-value for value in E2M1)), dtype=wide, device=tensor.device)
        exponents = scale.view(torch.float8_e8m0fnu).to(wide).repeat_interleave(MXFP4.group.columns, -1)
        return (values[unpacked(tensor, FP4).int()] * exponents).to(dtype)
    if tensor.dtype is PACKED:
        quantised(tensor, scale, zero_point)
        zero_point = MIDDLE if zero_point is None else expanded(zero_point, values_shape(tensor))
        tensor = unpacked(tensor, UINT4).to(wide) - zero_point
    return (tensor.to(wide) * expanded(scale, tensor.shape).to(wide)).to(dtype)


def scales_of(values: torch.Tensor, dtype: torch.dtype, group: GroupShape) -> torch.Tensor:
    """The smallest scales, in fp32, with which a matrix fits the range of `dtype`. fp64 values have fp64 scales.

    They are at least SMALLEST_SCALES of the dtype. Those of integers are symmetric: the least integer is not used.
    """
    wide = torch.float64 if values.dtype is torch.float64 else torch.float32
    numbers = group.scale_shape(values.shape)
    sizes = [max(all_, 1) if size == WHOLE else size for size, all_ in zip(group, values.shape, strict=True)]
    missing = [number * size - all_ for number, size, all_ in zip(numbers, sizes, values.shape, strict=True)]
    blocks = F.pad(values.abs().to(wide), (0, missing[1], 0, missing[0]))
    blocks = blocks.view(numbers[0], sizes[0], numbers[1], sizes[1])
    # PyTorch on a GPU would multiply by the reciprocal of a number, and not divide. A CUDA graph cannot copy a number.
    largest = blocks.new_full((), limits(dtype).max)
    return (blocks.amax((1, 3)) / largest).clamp(min=SMALLEST_SCALES[dtype])


def stored_mxfp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices rounded to MXFP4, as bytes and their scales: the smallest scales with which the values fit.

    values: [..., columns], whose columns are a multiple of 32. A block with NaN has a scale that is NaN.
    """
    blocks = values.double().unflatten(-1, (-1, MXFP4.group.columns))
    largest = blocks.abs().amax(-1, keepdim=True)
    exponents = (largest / E2M1[-1]).log2().ceil().clamp(-127, 127)
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(E2M1)], dtype=torch.double, device=values.device)
    scaled = blocks / exponents.exp2()
    nibbles = torch.bucketize(scaled.abs(), middles) + torch.where(scaled < 0, 8, 0)
    scale = torch.where(exponents.isnan(), NO_SCALE, exponents.nan_to_num() + 127).to(torch.uint8)
    return packed(nibbles.flatten(-2), FP4), scale.squeeze(-1)


def limits(dtype: torch.dtype) -> torch.finfo | torch.iinfo:
    """The least and the largest value of a dtype, as `min` and `max`."""
    return torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)


def stored(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A matrix divided by its scales and rounded to nearest in `dtype`, ties to even.

    What is out of the dtype's range becomes its least or its largest value.

    The quotients of fp64 values are not rounded, so that parity measures the rounding of a kernel.
    """
    wide = torch.float64 if values.dtype is torch.float64 else torch.float32
    range_ = limits(dtype)
    quotients = (values.to(wide) / expanded(scale, values.shape).to(wide)).clamp(range_.min, range_.max)
    if wide is torch.float64:
        return quotients
    return (quotients if dtype.is_floating_point else quotients.round()).to(dtype)


def expanded(scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Scales that broadcast to a matrix of this shape."""
    for dimension, (size, rows) in enumerate(zip(group_of(shape, scale.shape), shape, strict=True)):
        if size not in (WHOLE, 1):
            scale = scale.repeat_interleave(size, dimension).narrow(dimension, 0, rows)
    return scale


def check_scale(name: str, scale: torch.Tensor | None, shape: tuple[int, ...], group: GroupShape) -> None:
    """Raise ValueError, with the name of the tensor, for a scale that is missing, of another granularity or no number.

    Negative scales are numbers: some quantisers choose the sign, and `--load-format dummy` draws some.

    shape: of the weight, which may be one matrix or one for each expert. vLLM fills a scale that the checkpoint lacks
    with the most negative number. This reads values back from the device, so it is for weights that were just loaded.
    """
    wanted = [*shape[:-2], *group.scale_shape(shape[-2:])]
    if scale is None:
        raise ValueError(f"{name} is missing: a weight of {list(shape)} quantised {group} needs one of {wanted}")
    if list(scale.shape) != wanted:
        raise ValueError(f"{name} is {list(scale.shape)}; a weight of {list(shape)} quantised {group} needs {wanted}")
    usable = torch.isfinite(scale) & (scale > torch.finfo(scale.dtype).min)
    if not usable.all():
        which = "" if scale.ndim == 2 else f" for expert {int(usable.flatten(1).all(1).int().argmin())}"
        raise ValueError(
            f"{name} holds NaN, infinity or the lowest number{which}: the checkpoint is damaged, or lacks it"
        )
