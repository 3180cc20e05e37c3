"""What the gated activations share: they all map [..., 2 * d] to [..., d], elementwise over the two halves."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vllm_opset.ops import samples
from vllm_opset.ops.contract import Cost, Op, Problem, Sample


@dataclass(frozen=True)
class GatedProblem(Problem):
    """size: d, the width of the output."""

    size: int


def complete(op: Op, *, flops_per_element: int, **arguments: float | str) -> None:
    """Gives a gated activation its samples, cost and problem. arguments: keyword arguments that the samples also pass."""

    @op.problem_of
    def _(x, **_) -> GatedProblem:
        return GatedProblem(x.device.type, x.dtype, x.shape[-1] // 2)

    @op.cost
    def _(x, **_) -> Cost:
        return Cost(bytes=x.nbytes + x.nbytes // 2, flops=flops_per_element * x.numel() // 2)

    def sample(name: str, shape: tuple[int, ...], device: str, dtype: torch.dtype, *, std=2.0, strided=False) -> Sample:
        def make():
            x = samples.normal(shape, dtype, device, samples.generator(name), std)
            return (samples.row_view(x) if strided else x,), dict(arguments)

        return Sample(name, make)

    @op.sample_inputs
    def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
        yield sample("zero tokens", (0, 64), device, dtype)
        yield sample("one token", (1, 256), device, dtype)
        yield sample("odd width", (3, 2 * 77), device, dtype)
        yield sample("one element a half", (5, 2), device, dtype)
        yield sample("strided rows", (7, 96), device, dtype, strided=True)
        yield sample("three dimensions", (2, 3, 128), device, dtype)
        yield sample("saturating values", (2, 64), device, dtype, std=50.0)

    @op.bench_inputs
    def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
        for num_tokens in (1, 64, 256, 4096, 16384):
            yield sample(f"T{num_tokens} I12288", (num_tokens, 2 * 12288), device, dtype)
