"""Code that the gated activations share. They map [..., 2 * d] to [..., d]: a gate and an up give one element."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops.contract import Cost, Op, Problem, Sample


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two halves of the last dimension, as views. Raises ValueError if it is odd."""
    check_width(x)
    return x.chunk(2, dim=-1)


def check_width(x: torch.Tensor) -> None:
    """Refuses an odd last dimension, because halves of sizes 1 and 2 would broadcast unnoticed."""
    if x.shape[-1] % 2:
        raise ValueError(f"the last dimension holds gate and up, so it must be even, not {x.shape[-1]}")


def complete(
    op: Op, *, flops_per_element: int, variants: Sequence[Mapping[str, float | str]] = ({},), degree: int = 1
) -> None:
    """Gives a gated activation everything except its reference.

    flops_per_element: FLOP for each output element. variants: sets of keyword arguments; each sample is made with each.
    degree: the power of the inputs' magnitude with which errors grow.
    """

    @op.problem_of
    def _(x, *_, **__) -> Problem:
        return Problem(x.device.type, x.dtype)

    @op.cost
    def _(x, *_, **__) -> Cost:
        return Cost(bytes=x.nbytes + x.nbytes // 2, flops=flops_per_element * x.numel() // 2)

    def sample(name, shape, device, dtype, arguments, *, std=2.0, layout=lambda x: x, on="cpu") -> Sample:
        name = ", ".join([name, *(f"{key}={value}" for key, value in arguments.items())])

        def make():
            rng = _samples.generator(name, on)
            return (layout(_samples.normal(shape, dtype, device, rng, std)),), dict(arguments)

        return Sample(name, make, scale=std**degree)

    @op.sample_inputs
    def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
        for variant in variants:
            yield sample("zero tokens", (0, 64), device, dtype, variant)
            yield sample("one token", (1, 256), device, dtype, variant)
            yield sample("odd width", (3, 2 * 77), device, dtype, variant)
            yield sample("one element a half", (5, 2), device, dtype, variant)
            yield sample("strided rows", (7, 96), device, dtype, variant, layout=_samples.row_view)
            yield sample("strided columns", (7, 96), device, dtype, variant, layout=_samples.column_major)
            yield sample("three dimensions", (2, 3, 128), device, dtype, variant)
            yield sample("saturating values", (4, 128), device, dtype, variant, std=50.0)

    @op.illegal_inputs
    def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
        for width in (1, 3, 65):
            x = torch.ones(4, width, dtype=dtype, device=device)
            yield Sample(f"a width of {width}", lambda x=x: ((x,), dict(variants[0])))

    @op.bench_inputs
    def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
        for num_tokens in _samples.bench_tokens(device):
            yield sample(f"T{num_tokens} I12288", (num_tokens, 2 * 12288), device, dtype, variants[0], on=device)

    _properties.rows_are_independent(op, lambda run, x: run(x, **variants[0]))
