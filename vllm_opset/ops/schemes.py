"""The quantisation of weights and activations: how a tensor's values are stored, and which of them share a scale.

A stored value stands for `value * scale`. The scales of a matrix are a matrix too, whose shape says the granularity.

- [1, 1]: one scale for the whole matrix
- [rows, 1]: one for each row, that is for each token of activations or output channel of a weight
- [rows / 128, columns / 128]: one for each block of 128 x 128

Blocks have powers of two for sizes, and the last ones may be incomplete.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

FP8, INT8 = torch.float8_e4m3fn, torch.int8
UINT4 = torch.uint4  # PyTorch has the name alone: `ops/uint4` packs such values in bytes
WHOLE = -1
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
        return tuple(1 if group == WHOLE else -(-size // group) for size, group in zip(shape, self, strict=True))


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


def quantised(tensor: torch.Tensor, scale: torch.Tensor | None) -> Quantised | None:
    """How a tensor with this scale is stored."""
    return None if scale is None else Quantised(tensor.dtype, group_of(tensor.shape, scale))


def group_of(shape: tuple[int, ...], scale: torch.Tensor) -> GroupShape:
    """The values of a matrix that share a scale. Raises ValueError for a scale of no such granularity."""
    if scale.ndim != len(shape):
        raise ValueError(f"the scale of {list(shape)} must be a matrix, not {list(scale.shape)}")
    return GroupShape(*(_group_size(size, scales) for size, scales in zip(shape, scale.shape, strict=True)))


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


def dequantise(tensor: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The matrix that a stored one stands for. The product with the scale, in fp32 or fp64, is rounded once."""
    if scale is None:
        return tensor.to(dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
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
    return (blocks.amax((1, 3)) / limits(dtype).max).clamp(min=SMALLEST_SCALES[dtype])


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
    for dimension, (size, rows) in enumerate(zip(group_of(shape, scale), shape, strict=True)):
        if size not in (WHOLE, 1):
            scale = scale.repeat_interleave(size, dimension).narrow(dimension, 0, rows)
    return scale


def check_scale(
    name: str, scale: torch.Tensor | None, shape: tuple[int, ...], group: GroupShape, signed: bool = False
) -> None:
    """Raise ValueError, with the name of the tensor, for a scale that is missing, of another granularity or no number.

    vLLM fills a scale that the checkpoint lacks with the most negative number. This reads values back from the device,
    so it is for weights that were just loaded. signed: whether the format has negative scales.
    """
    wanted = list(group.scale_shape(shape))
    if scale is None:
        raise ValueError(f"{name} is missing: a weight of {list(shape)} quantised {group} needs one of {wanted}")
    if list(scale.shape) != wanted:
        raise ValueError(f"{name} is {list(scale.shape)}; a weight of {list(shape)} quantised {group} needs {wanted}")
    if not (torch.isfinite(scale) & (signed | (scale >= 0))).all():
        raise ValueError(f"{name} holds NaN, infinity or a negative number: the checkpoint is damaged, or lacks it")
