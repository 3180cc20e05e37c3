"""Code that ops share whose result is quantised before it is stored: `rms_norm_quant` and its relatives.

Each is another op followed by `quantise`, in one pass. Between the two, values are rounded to x's dtype, as if they had
been stored. So a layer with the fused op gives the numbers of a layer with both ops.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops.contract import ROUND_ONCE, Cost, Op, Sample, Tolerance
from vllm_opset.ops.quantisation.quantise import check_arguments as check_quantisation
from vllm_opset.ops.quantisation.quantise import quantise
from vllm_opset.ops.schemes import FP8, INT8, PER_ROW, PER_TENSOR, GroupShape, limits

PER_BLOCK = GroupShape(1, 128)
# A value and the largest one of its group are rounded to bf16, which adds an error of 2**-9 to each. It is twice that
# where fp32 in another order falls on the other side of a tie.
TOLERANCES = {
    **ROUND_ONCE,
    torch.float32: Tolerance(2**-8, 2e-6, "a scale comes from a largest value that is rounded to x's dtype"),
    FP8: Tolerance(2**-4 * 1.001 + 2**-7, 2**-10 * 1.001, "rounded to x's dtype, then to 4 bits of mantissa"),
    INT8: Tolerance(2**-7, 0.5 * 1.001, "rounded to x's dtype, then to an integer"),
}


def quantised(
    y: torch.Tensor,
    to_dtype: torch.dtype,
    group_shape: list[int],
    scale: torch.Tensor | None,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of such an op, from the result of the first of its parts. It is also written to `out`."""
    if out is not None:
        out.copy_(y)
    return quantise(y, to_dtype, group_shape, scale)


def check_arguments(
    x: torch.Tensor,
    columns: int,
    to_dtype: torch.dtype,
    group_shape: list[int],
    scale: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """columns: of the result."""
    check_quantisation((*x.shape[:-1], columns), to_dtype, group_shape, scale)
    if reason := why_not(GroupShape(*group_shape), scale is not None):
        raise ValueError(reason)
    if out is not None and (out.dtype != x.dtype or tuple(out.shape) != (len(x), columns)):
        raise ValueError(f"out must be {x.dtype} {[len(x), columns]}, not {out.dtype} {list(out.shape)}")


def why_not(group: GroupShape, static: bool) -> str | None:
    """Why no fused op has such scales, or None. static: whether they are given."""
    if static:
        return None if group == PER_TENSOR else f"one given scale serves all values, not scales {group}"
    return None if group.rows == 1 else f"scales {group} depend on many rows, and here each row is finished by itself"


@dataclass(frozen=True)
class Case:
    """A sample. shape: of the result. out: whether it is also written unquantised. given: the scale, if one is.

    others: arguments of the example of the op.
    """

    name: str
    shape: tuple[int, int]
    group: GroupShape = PER_ROW
    to_dtype: torch.dtype = FP8
    std: float = 1.0
    out: bool = False
    layout: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    others: dict = field(default_factory=dict)

    def quantisation(self, dtype: torch.dtype, device: str) -> dict:
        given = None
        if self.group == PER_TENSOR:  # results beyond ±2 are limited to the range
            given = torch.full((1, 1), 2 / limits(self.to_dtype).max, device=device)
        out = torch.full(self.shape, torch.nan, dtype=dtype, device=device) if self.out else None
        return {"to_dtype": self.to_dtype, "group_shape": list(self.group), "scale": given, "out": out}


CASES = (
    Case("zero tokens", (0, 64)),
    Case("zero tokens, a given scale", (0, 64), PER_TENSOR),
    Case("fp8 per row", (5, 256)),
    Case("fp8 per row, one token, result kept", (1, 128), out=True),
    Case("fp8 per row, odd columns", (3, 77)),
    Case("fp8 per row, strided rows", (7, 96), layout=_samples.row_view),
    Case("fp8 per row, strided columns, result kept", (7, 96), out=True, layout=_samples.column_major),
    Case("fp8 per row, large values", (3, 64), std=50.0),
    Case("fp8 per row, rows of zeros", (3, 64), std=0.0),
    Case("fp8 per row, Qwen3-8B hidden size", (2, 4096)),
    Case("fp8 per block", (5, 256), PER_BLOCK),
    Case("fp8 per block, result kept", (5, 384), PER_BLOCK, out=True),
    Case("fp8 per block, incomplete", (3, 200), PER_BLOCK),
    Case("fp8 per block, padded rows of scales", (3, 4096), PER_BLOCK),
    Case("fp8 per block wider than a row", (3, 64), PER_BLOCK),
    Case("fp8 per block, strided rows", (7, 384), PER_BLOCK, layout=_samples.row_view),
    Case("fp8 with a given scale", (5, 256), PER_TENSOR),
    Case("fp8 with a given scale, odd columns, result kept", (3, 77), PER_TENSOR, out=True),
    Case("int8 per row", (5, 256), to_dtype=INT8),
    Case("int8 with a given scale", (5, 256), PER_TENSOR, INT8),
)


def complete(
    op: Op,
    example: Callable[..., tuple],
    *,
    flops_per_element: int,
    bench_columns: tuple[int, ...],
    further: tuple[Case, ...] = (),
) -> None:
    """Gives an op samples, refusals, benchmarks, its cost and properties.

    example: `(shape of the result, dtype, device, generator, std, layout, **others)` -> the arguments before those that
    all these ops have. The first is x.
    """

    def sample(case: Case, device: str, dtype: torch.dtype, on: str = "cpu") -> Sample:
        def make():
            rng = _samples.generator(case.name, on)
            arguments = example(case.shape, dtype, device, rng, case.std, case.layout, **case.others)
            return arguments, case.quantisation(dtype, device)

        return Sample(case.name, make, scale=max(1.0, case.std))

    @op.sample_inputs
    def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
        for case in (*CASES, *further):
            yield sample(case, device, dtype)

    @op.illegal_inputs
    def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
        def refused(name: str, group: GroupShape, scales: tuple | None = None, out: tuple | None = None) -> Sample:
            def make():
                arguments, quantisation = sample(Case(name, (4, 96), group), device, dtype).make()
                quantisation["scale"] = None if scales is None else torch.ones(scales, device=device)
                quantisation["out"] = None if out is None else torch.empty(out, dtype=dtype, device=device)
                return arguments, quantisation

            return Sample(name, make)

        yield refused("groups of 96", GroupShape(1, 96))
        yield refused("a scale for all values that is not given", PER_TENSOR)
        yield refused("scales by rows that are given", PER_ROW, scales=(4, 1))
        yield refused("a scale that is a vector", PER_TENSOR, scales=(1,))
        yield refused("an out of fewer columns", PER_ROW, out=(4, 95))

    @op.bench_inputs
    def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
        for num_tokens in _samples.bench_tokens(device):
            for columns in bench_columns:
                for group in (PER_ROW, PER_BLOCK):
                    case = Case(f"T{num_tokens} {columns} {group}", (num_tokens, columns), group)
                    yield sample(case, device, dtype, on=device)

    @op.cost
    def _(*args, **kwargs) -> Cost:
        given = op.signature.bind(*args, **kwargs).arguments
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        shape = len(given["x"]), op.problem_for(*args, **kwargs).columns
        elements, scales = shape[0] * shape[1], math.prod(GroupShape(*given["group_shape"]).scale_shape(shape))
        read = sum(tensor.nbytes for name, tensor in tensors.items() if name != "out")
        written = sum(tensors[name].nbytes for name in op.mutates if name in tensors)
        written += elements * given["to_dtype"].itemsize + 4 * scales
        return Cost(bytes=read + written, flops=flops_per_element * elements)

    @op.property_
    def quantises_the_stored_result(run, device: str, dtype: torch.dtype) -> None:
        """The values and scales are those of `quantise` for the result that is also written, bit for bit."""
        for group in (PER_ROW, PER_BLOCK, PER_TENSOR):
            arguments, quantisation = sample(Case("stored", (6, 4096), group, out=True), device, dtype).make()
            got = run(*arguments, **quantisation)
            # On a CPU, since PyTorch on a GPU multiplies by the reciprocal of what it is to divide by.
            given = None if quantisation["scale"] is None else quantisation["scale"].cpu()
            want = quantise(quantisation["out"].cpu(), FP8, list(group), given)
            for what, have, wanted in zip(("values", "scales"), got, want, strict=True):
                _properties.equal(f"{what} {group} are not of the stored result", have.cpu().float(), wanted.float())
                strides = torch.tensor(have.stride()), torch.tensor(wanted.stride())
                _properties.equal(f"{what} {group} have other strides, on which compiled code relies", *strides)
