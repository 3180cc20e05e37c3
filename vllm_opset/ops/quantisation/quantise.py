"""quantise: stores a matrix in a narrow dtype, with a scale for each group of its values.

Semantics: vLLM's `QuantFP8.forward_native`, `scaled_fp8_quant` and symmetric `scaled_int8_quant`, with scales that are
always matrices. In some places vLLM multiplies by the reciprocal of a scale. This op divides.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops.contract import ROUND_ONCE, Cost, Problem, Sample, Tolerance, op
from vllm_opset.ops.schemes import FP8, INT8, PER_ROW, PER_TENSOR, WHOLE, GroupShape, scales_of, stored

TOLERANCES = {
    **ROUND_ONCE,
    # A little more than half a step, since a quotient near the middle of one moves with the last bit of its scale.
    FP8: Tolerance(2**-4 * 1.001, 2**-10, "rounded to 4 bits of mantissa, or to a multiple of 2**-9"),
    INT8: Tolerance(0.0, 0.5 * 1.001, "rounded to an integer"),
}
STORED = (FP8, INT8)


@dataclass(frozen=True)
class QuantiseProblem(Problem):
    """dtype: of the values. static: whether the scales are given."""

    to_dtype: torch.dtype
    group: GroupShape
    static: bool
    columns: int


@op(problem=QuantiseProblem, tolerances=TOLERANCES)
def quantise(
    x: torch.Tensor, to_dtype: torch.dtype, group_shape: list[int], scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x / scale, rounded to nearest even and limited to the range of to_dtype; scale), computed in fp32.

    x: [rows, columns], any strides. to_dtype: torch.float8_e4m3fn or torch.int8. group_shape: the numbers of rows and
    columns that share a scale. They are powers of two, or −1 for all. [−1, −1] is one scale, [1, −1] one for each row,
    and [1, 128] one for 128 values of a row.

    scale: fp32, of the shape that `ops/schemes` gives these groups, any strides. Without it, a scale is the largest
    magnitude of its group divided by the largest value of to_dtype, and at least `SMALLEST_SCALES`.

    Returns new tensors: contiguous [rows, columns] of to_dtype, and fp32 scales, whose strides are those of
    `GroupShape.new_scales`. Zero rows are allowed. Values in fp64 have scales in fp64, and their quotients are not
    rounded. A group that holds NaN may become any values.
    Raises ValueError if x is no matrix, or for another dtype, group or shape of the scale.
    """
    check_arguments(x.shape, to_dtype, group_shape, scale)
    group = GroupShape(*group_shape)
    scale = as_result(scales_of(x, to_dtype, group) if scale is None else scale, x.shape, group)
    return stored(x, scale, to_dtype).contiguous(), scale


def as_result(scale: torch.Tensor, shape: tuple[int, ...], group: GroupShape) -> torch.Tensor:
    """Scales as results for values of this shape: new, with the strides of `GroupShape.new_scales`."""
    return group.new_scales(scale, shape, scale.dtype).copy_(scale)


def check_arguments(
    shape: tuple[int, ...], to_dtype: torch.dtype, group_shape: list[int], scale: torch.Tensor | None
) -> None:
    """shape: of the values."""
    if len(shape) != 2 or to_dtype not in STORED:
        raise ValueError(f"a matrix can be quantised to {FP8} or {INT8}, not {list(shape)} to {to_dtype}")
    if len(group_shape) != 2 or any(size != WHOLE and (size < 1 or size.bit_count() != 1) for size in group_shape):
        raise ValueError(f"groups have powers of two for sizes, or -1 for all, not {list(group_shape)}")
    wanted = GroupShape(*group_shape).scale_shape(shape)
    if scale is not None and tuple(scale.shape) != wanted:
        raise ValueError(f"the scales of {list(shape)} must be {list(wanted)}, not {list(scale.shape)}")


@quantise.problem_of
def _(x, to_dtype, group_shape, scale=None) -> QuantiseProblem:
    group = GroupShape(*group_shape)
    return QuantiseProblem(x.device.type, x.dtype, to_dtype, group, scale is not None, x.shape[1])


@quantise.cost
def _(x, to_dtype, group_shape, scale=None) -> Cost:
    rows, columns = GroupShape(*group_shape).scale_shape(x.shape)
    return Cost(bytes=x.nbytes + x.numel() * to_dtype.itemsize + 4 * rows * columns, flops=3 * x.numel())


@quantise.sample_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(
        name, shape, group, *, to_dtype=FP8, static=False, by_columns=False, std=1.0, layout=lambda x: x
    ) -> Sample:
        def make():
            rng = _samples.generator(name)
            x = _samples.normal(shape, dtype, device, rng, std)
            # Static scales are too small for some values, which are then limited to the range.
            scale = scales_of(x.float(), to_dtype, group) * 0.75 if static else None
            if by_columns:
                scale = _samples.column_major(scale)
            return (layout(x), to_dtype, list(group), scale), {}

        return Sample(name, make)

    yield sample("zero tokens, fp8 per row", (0, 64), PER_ROW)
    for name, group in (("tensor", PER_TENSOR), ("row", PER_ROW), ("block of a row", GroupShape(1, 128))):
        yield sample(f"fp8 per {name}", (5, 256), group)
        yield sample(f"fp8 per {name}, static", (5, 256), group, static=True)
        yield sample(f"fp8 per {name}, odd columns", (3, 77), group)
        yield sample(f"fp8 per {name}, strided rows", (7, 96), group, layout=_samples.row_view)
    by_blocks = GroupShape(1, 128)
    yield sample("fp8 per block of a row, static by columns", (5, 256), by_blocks, static=True, by_columns=True)
    yield sample("fp8 per block of a row, incomplete", (3, 200), by_blocks)
    yield sample("fp8 per block of a row, padded rows of scales", (3, 4096), by_blocks)
    yield sample("fp8 per block of a row, padded rows of scales, static", (3, 4096), by_blocks, static=True)
    yield sample("fp8 per block of rows and columns", (150, 200), GroupShape(128, 128))
    yield sample("fp8 per row, strided columns", (7, 96), PER_ROW, layout=_samples.column_major)
    yield sample("fp8 per row, large values", (3, 64), PER_ROW, std=1000.0)
    yield sample("fp8 per row, values below the smallest scale", (3, 64), PER_ROW, std=1e-4)
    yield sample("fp8 per row, Qwen3-8B hidden size", (2, 4096), PER_ROW)
    yield sample("int8 per tensor", (5, 256), PER_TENSOR, to_dtype=INT8)
    yield sample("int8 per tensor, static", (5, 256), PER_TENSOR, to_dtype=INT8, static=True)
    yield sample("int8 per row", (5, 256), PER_ROW, to_dtype=INT8)
    yield sample("int8 per row, odd columns", (3, 77), PER_ROW, to_dtype=INT8, layout=_samples.row_view)
    yield sample("int8 per row, small values", (3, 64), PER_ROW, to_dtype=INT8, std=1e-4)


@quantise.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name: str, group: tuple[int, int], *rest, shape=(4, 96)) -> Sample:
        def make():
            scales = (torch.ones(size, device=device) for size in rest)
            return (torch.ones(shape, dtype=dtype, device=device), FP8, list(group), *scales), {}

        return Sample(name, make)

    yield sample("groups of 96", (1, 96))
    yield sample("groups of no column", (1, 0))
    yield sample("groups of fewer than no row", (-4, -1))
    yield sample("one scale for groups of a row", PER_ROW, (1, 1))
    yield sample("a scale that is a vector", PER_ROW, (4,))
    yield sample("three dimensions", PER_ROW, shape=(2, 4, 96))


@quantise.bench_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(num_tokens: int, group: GroupShape) -> Sample:
        def make():
            rng = _samples.generator(f"{num_tokens}", device)
            return (_samples.normal((num_tokens, 4096), dtype, device, rng), FP8, list(group)), {}

        return Sample(f"T{num_tokens} 4096 {group}", make)

    for num_tokens in _samples.bench_tokens(device):
        for group in (PER_ROW, GroupShape(1, 128)):
            yield sample(num_tokens, group)


@quantise.property_
def powers_of_two_are_kept(run, device: str, dtype: torch.dtype) -> None:
    """Values of fp8 are stored as they are, and ties go to the even neighbour."""
    x = torch.tensor([[1.0, -2.0, 0.25, 2**-9, 448.0, 17.0, 19.0, -(2**-10), 3 * 2**-10]], dtype=dtype, device=device)
    values, scale = run(x, FP8, list(PER_ROW), torch.ones(1, 1, device=device))
    want = [[1.0, -2.0, 0.25, 2**-9, 448.0, 16.0, 20.0, 0.0, 2**-8]]
    _properties.equal("a value is rounded wrongly", values.float(), torch.tensor(want, device=device))
    _properties.equal("a given scale changes", scale, torch.ones(1, 1, device=device))


@quantise.property_
def integers_are_kept(run, device: str, dtype: torch.dtype) -> None:
    """Integers are stored as they are, ties go to the even neighbour, and the least integer is one that is reached."""
    x = torch.tensor([[1.0, -2.0, 0.5, 1.5, -2.5, 127.0, 128.0, -128.0, -200.0]], dtype=dtype, device=device)
    values, scale = run(x, INT8, list(PER_ROW), torch.ones(1, 1, device=device))
    want = [[1, -2, 0, 2, -2, 127, 127, -128, -128]]
    _properties.equal("a value is rounded wrongly", values.int(), torch.tensor(want, dtype=torch.int32, device=device))
    _properties.equal("a given scale changes", scale, torch.ones(1, 1, device=device))


@quantise.property_
def scales_have_the_strides_of_new_scales(run, device: str, dtype: torch.dtype) -> None:
    """Compiled code relies on the strides of the reference's results."""
    group = GroupShape(1, 128)
    x = torch.ones(3, 4096, dtype=dtype, device=device)
    strides = group.new_scales(x, x.shape).stride()
    _properties.equal("strides differ", torch.tensor(run(x, FP8, list(group))[1].stride()), torch.tensor(strides))


_properties.rows_are_independent(quantise, lambda run, x: run(x, FP8, list(PER_ROW))[0].float())
