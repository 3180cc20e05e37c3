"""layer_norm: normalisation to zero mean and unit variance over the last dimension.

Semantics: `torch.nn.functional.layer_norm` over the last dimension, as vLLM's `LayerNorm` and `torch.nn.LayerNorm` call
it. The statistics and the affine part are in fp32, whatever the dtypes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops.contract import Cost, Problem, Sample, accumulator, op
from vllm_opset.ops.norm.rms_norm import check_parameter


@dataclass(frozen=True)
class LayerNormProblem(Problem):
    """hidden_size: size of the normalised dimension. weight_dtype: dtype of weight and bias; None without a weight."""

    hidden_size: int
    weight_dtype: torch.dtype | None


@op(problem=LayerNormProblem)
def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """y = (x − mean(x)) / sqrt(mean((x − mean(x))²) + epsilon) * weight + bias, in fp32 and rounded once.

    The variance is computed from the centred values, because mean(x²) − mean(x)² would cancel in rows far from zero.

    x: [..., hidden_size], any strides. weight, bias: [hidden_size], of x's dtype or fp32; each may be None.
    Returns a new contiguous tensor of x's shape and dtype. Zero rows are allowed.
    Raises ValueError if weight or bias is not [hidden_size], because broadcasting would go unnoticed.
    """
    check_parameter(weight, x)
    check_parameter(bias, x)
    wide = x.to(accumulator(x))
    centred = wide - wide.mean(dim=-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + epsilon)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype).contiguous()


@layer_norm.problem_of
def _(x, weight, bias, epsilon) -> LayerNormProblem:
    return LayerNormProblem(x.device.type, x.dtype, x.shape[-1], None if weight is None else weight.dtype)


@layer_norm.cost
def _(x, weight, bias, epsilon) -> Cost:
    parameter_bytes = sum(parameter.nbytes for parameter in (weight, bias) if parameter is not None)
    return Cost(bytes=2 * x.nbytes + parameter_bytes, flops=7 * x.numel())


@layer_norm.sample_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(
        name, shape, *, weight=True, bias=True, parameters=dtype, mean=0.0, std=1.0, layout=lambda x: x
    ) -> Sample:
        def make():
            rng = _samples.generator(name)
            x = layout(_samples.normal(shape, dtype, device, rng, std) + mean)
            affine = [_samples.normal(x.shape[-1:], parameters, device, rng) for _ in range(2)]
            return (x, affine[0] if weight else None, affine[1] if bias else None, 1e-5), {}

        return Sample(name, make, scale=max(1.0, abs(mean)))

    yield sample("zero tokens", (0, 64))
    yield sample("one token", (1, 128))
    yield sample("odd hidden size", (3, 77))
    yield sample("one element a row", (5, 1))
    yield sample("neither weight nor bias", (4, 64), weight=False, bias=False)
    yield sample("no bias", (4, 64), bias=False)
    yield sample("no weight", (4, 64), weight=False)
    yield sample("fp32 weight and bias", (4, 256), parameters=torch.float32)
    yield sample("strided rows", (7, 96), layout=_samples.row_view)
    yield sample("strided columns", (7, 96), layout=_samples.column_major)
    yield sample("three dimensions", (2, 3, 128))
    yield sample("heads before tokens in memory", (4, 5, 64), layout=lambda x: x.transpose(0, 1))
    yield sample("large values", (2, 64), std=100.0)
    yield sample("rows far from zero", (4, 256), mean=-1000.0)
    yield sample("GPT-NeoX-20B hidden size", (2, 6144))


@layer_norm.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name: str, weight: tuple[int, ...], bias: tuple[int, ...]) -> Sample:
        shapes = ((3, 64), weight, bias)
        return Sample(name, lambda: ((*(torch.ones(s, dtype=dtype, device=device) for s in shapes), 1e-5), {}))

    yield sample("a weight of one element", (1,), (64,))
    yield sample("a bias of one element", (64,), (1,))
    yield sample("a bias a token", (64,), (3, 64))


@layer_norm.bench_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(num_tokens: int) -> Sample:
        def make():
            rng = _samples.generator(str(num_tokens), device)
            x = _samples.normal((num_tokens, 6144), dtype, device, rng)
            return (x, *(_samples.normal((6144,), dtype, device, rng) for _ in range(2)), 1e-5), {}

        return Sample(f"T{num_tokens} H6144", make)

    for num_tokens in _samples.bench_tokens(device):
        yield sample(num_tokens)


@layer_norm.property_
def scale_invariant(run, device: str, dtype: torch.dtype) -> None:
    """Without epsilon, multiplying the input by a power of two changes no bit of the result."""
    x = _samples.normal((4, 64), dtype, device, _samples.generator("scale"))
    _properties.equal("a larger input changes the result", run(x * 4, None, None, 0.0), run(x, None, None, 0.0))


_properties.rows_are_independent(layer_norm, lambda run, x: run(x, None, None, 1e-5))
