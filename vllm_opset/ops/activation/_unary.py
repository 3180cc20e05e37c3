"""Code that the unary activations share. They map each element of x to one element of the result."""

from collections.abc import Iterator

import torch

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops.contract import Cost, Op, Problem, Sample


def complete(op: Op, *, flops_per_element: int) -> None:
    """Gives a unary activation everything except its reference."""

    @op.problem_of
    def _(x) -> Problem:
        return Problem(x.device.type, x.dtype)

    @op.cost
    def _(x) -> Cost:
        return Cost(bytes=2 * x.nbytes, flops=flops_per_element * x.numel())

    def sample(name, shape, device, dtype, *, std=2.0, layout=lambda x: x, on="cpu") -> Sample:
        def make():
            return (layout(_samples.normal(shape, dtype, device, _samples.generator(name, on), std)),), {}

        return Sample(name, make, scale=std)

    @op.sample_inputs
    def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
        yield sample("zero tokens", (0, 64), device, dtype)
        yield sample("one token", (1, 256), device, dtype)
        yield sample("odd width", (3, 77), device, dtype)
        yield sample("one element", (1, 1), device, dtype)
        yield sample("strided rows", (7, 96), device, dtype, layout=_samples.row_view)
        yield sample("strided columns", (7, 96), device, dtype, layout=_samples.column_major)
        yield sample("three dimensions", (2, 3, 128), device, dtype)
        yield sample("saturating values", (4, 128), device, dtype, std=50.0)

    @op.bench_inputs
    def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
        for num_tokens in _samples.bench_tokens(device):
            yield sample(f"T{num_tokens} I16384", (num_tokens, 16384), device, dtype, on=device)

    _properties.rows_are_independent(op, lambda run, x: run(x))
