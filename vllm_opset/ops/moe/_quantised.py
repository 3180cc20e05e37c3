"""Quantised weights of experts, and the quantisation of their activations, as the contracts state them."""

import torch

from vllm_opset.ops import _samples
from vllm_opset.ops.gemm._packed import random_weight
from vllm_opset.ops.quantisation.quantise import quantise
from vllm_opset.ops.schemes import (
    FP4,
    FP8,
    INT8,
    NONE,
    PACKED,
    PER_TENSOR,
    GroupShape,
    Quantised,
    Scheme,
    dequantise,
    group_of,
    quantised,
    scales_of,
    stored,
    stored_mxfp4,
    values_shape,
)

# Scales of activations in samples. The largest values are 7 and 4, which few normal values exceed.
GIVEN_SCALES = {FP8: 2.0**-6, INT8: 2.0**-5}
# The second product's factor comes from the first, in the order of a kernel. A value of it near the middle of two that
# can be stored may become either. Some such steps, of 1/16 of a value each, move a result by this much.
ANOTHER_STEP = 2.0**-4


def stored_experts(
    weight: torch.Tensor, scale: torch.Tensor | None, zero_point: torch.Tensor | None = None
) -> Quantised | None:
    """How the weights [num_experts, …] of experts with these scales [num_experts, …] are stored."""
    return None if scale is None else quantised(weight[0], scale[0], None if zero_point is None else zero_point[0])


def scheme_of(
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    activation: Quantised | None = None,
    zero_point: torch.Tensor | None = None,
) -> Scheme:
    """The scheme of a product by experts. activation: how activations are stored that are multiplied by weights."""
    return NONE if scale is None else Scheme(stored_experts(weight, scale, zero_point), activation)


def check_weight(
    name: str,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    zero_point: torch.Tensor | None = None,
) -> None:
    """Raises ValueError, with the name of the tensor, for a weight, a scale or a zero point that does not fit.

    A weight with a scale may be of any dtype, since a kernel may have prepared it.
    """
    found = values_shape(weight)
    if found != tuple(shape) or (scale is None and weight.dtype != dtype):
        raise ValueError(f"{name} must be {dtype} {list(shape)}, not {weight.dtype} {list(found)}")
    if scale is not None:
        check_scale(f"{name}_scale", weight, scale, zero_point)
    elif zero_point is not None:
        raise ValueError(f"{name} has zero points, but no scales")


def check_scale(name: str, weight: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None) -> None:
    """Raises ValueError, with the name of the tensor, unless it holds a matrix of scales for each expert's weight.

    It also raises it for a zero point of another shape than the scales', and for one of a weight of 8 bits.
    """
    if scale.ndim != weight.ndim or len(scale) != len(weight):
        raise ValueError(f"{name} must hold a matrix for each of {len(weight)} experts, not {list(scale.shape)}")
    if zero_point is not None and weight.dtype in (FP8, INT8):
        raise ValueError(f"only packed weights have zero points, and those of {name} are in {weight.dtype}")
    if zero_point is not None and zero_point.shape != scale.shape:
        raise ValueError(f"the zero points of {name} must be {list(scale.shape)}, not {list(zero_point.shape)}")
    if weight.dtype is PACKED:
        stored_experts(weight, scale, zero_point)
    else:
        group_of(weight.shape[1:], scale.shape[1:])


def weight_of(
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    expert: int,
    dtype: torch.dtype,
    zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weight that one expert's stored one stands for."""
    scale, zero_point = (None if part is None else part[expert] for part in (scale, zero_point))
    return dequantise(weight[expert], scale, dtype, zero_point)


def as_stored(
    x: torch.Tensor, dtype: torch.dtype | None, group_shape: list[int] | None, scale: torch.Tensor | None
) -> torch.Tensor:
    """What activations stand for once they are quantised, in x's dtype. dtype: None for activations as they are.

    They are rounded in fp64 too, unlike by `quantise`: the products are of rounded values.
    """
    if dtype is None:
        return x
    values, scale = quantise(x.float(), dtype, group_shape, scale)
    return dequantise(values, scale, x.dtype)


def rounded_experts(weight: torch.Tensor, group: GroupShape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of experts in `dtype` with their scales. Each row is larger than the last, so that scales differ."""
    rows = torch.linspace(0.25, 1, weight.shape[1], device=weight.device)[:, None]
    if dtype is FP4:
        parts = [stored_mxfp4(own) for own in weight * rows]  # one by one, because they need much memory
        return tuple(torch.stack(part) for part in zip(*parts, strict=True))
    scales = [scales_of(own, dtype, group) for own in weight * rows]
    values = [stored(own, scale, dtype) for own, scale in zip(weight * rows, scales, strict=True)]
    return torch.stack(values), torch.stack(scales)


def int4_experts(weight: torch.Tensor, group: int, zero_point: bool, rng: torch.Generator) -> tuple:
    """Packed weights of as many experts and of the shape of `weight`, their scales in its dtype, and zero points."""
    shape, device = weight.shape[1:], weight.device.type
    made = [random_weight(*shape, group, weight.dtype, device, rng, zero_point) for _ in weight]
    return tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*made, strict=True))


def in_int4(arguments: tuple, how: dict, group: int, zero_point: bool, on: str = "cpu"):
    """Arguments of fused_experts, with random weights in int4 in place of those given. on: where they are drawn."""
    x, w1, w2, *others = arguments
    rng = _samples.generator(f"int4 {group}", on)
    names = ("", "_scale", "_zero_point")
    parts = {
        f"{name}{part}": tensor
        for name, weight in (("w1", w1), ("w2", w2))
        for part, tensor in zip(names, int4_experts(weight, group, zero_point, rng), strict=True)
    }
    return (x, parts.pop("w1"), parts.pop("w2"), *others), how | parts | {"out_dtype": x.dtype}


def rounded(arguments: tuple, how: dict, group: GroupShape, x_group: GroupShape | None, dtype: torch.dtype):
    """Arguments of fused_experts, with weights in `dtype` and activations that are quantised in groups of x_group."""
    x, w1, w2, *others = arguments
    (w1, w1_scale), (w2, w2_scale) = (rounded_experts(weight.float(), group, dtype) for weight in (w1, w2))
    how = how | {"w1_scale": w1_scale, "w2_scale": w2_scale, "out_dtype": x.dtype}
    if x_group is not None:
        how |= {"quant_dtype": dtype, "group_shape": list(x_group)}
    if x_group == PER_TENSOR:
        how |= {name: x.new_full((1, 1), GIVEN_SCALES[dtype], dtype=torch.float32) for name in ("a1_scale", "a2_scale")}
    return (x, w1, w2, *others), how
