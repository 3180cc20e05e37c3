"""rms_norm: root-mean-square normalisation over the last dimension.

Semantics: vLLM's `RMSNorm.forward_native` without a residual (`vllm.ir.ops.rms_norm` in releases that have it), and its
`GemmaRMSNorm` with `weight_offset=1`. vLLM rounds to the weight's dtype before it multiplies by the weight. This op
rounds only the result; the difference is within the tolerance.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops.contract import Cost, Problem, Sample, accumulator, op


@dataclass(frozen=True)
class RMSNormProblem(Problem):
    """hidden_size: size of the normalised dimension. weight_dtype: None without a weight."""

    hidden_size: int
    weight_dtype: torch.dtype | None


@op(problem=RMSNormProblem)
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """y = x / sqrt(mean(x²) + epsilon) * (weight + weight_offset), computed in fp32 and rounded once.

    x: [..., hidden_size], any strides. weight: [hidden_size], contiguous, of x's dtype or fp32, or None for no
    scaling.
    weight_offset: added to the weight in fp32; 1 for Gemma, whose checkpoints store weight − 1.
    Returns a new contiguous tensor of x's shape and dtype. Zero rows are allowed.
    Raises ValueError for another shape or strides of the weight: broadcasting would go unnoticed, and kernels assume
    that the weight is contiguous.
    """
    check_parameter(weight, x)
    wide = x.to(accumulator(x))
    y = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    if weight is not None:
        y = y * (weight.to(wide.dtype) + weight_offset)
    return y.to(x.dtype).contiguous()


def check_parameter(parameter: torch.Tensor | None, x: torch.Tensor) -> None:
    """Refuses a weight or bias of a norm that is not contiguous with one value for each element of a row."""
    if parameter is not None and (parameter.shape != x.shape[-1:] or not parameter.is_contiguous()):
        raise ValueError(
            f"weight and bias must be [{x.shape[-1]}], as x's rows are, and contiguous, "
            f"not {list(parameter.shape)} with strides {list(parameter.stride())}"
        )


@rms_norm.problem_of
def _(x, weight, epsilon, weight_offset=0.0) -> RMSNormProblem:
    return RMSNormProblem(x.device.type, x.dtype, x.shape[-1], None if weight is None else weight.dtype)


@rms_norm.cost
def _(x, weight, epsilon, weight_offset=0.0) -> Cost:
    weight_bytes = 0 if weight is None else weight.nbytes
    return Cost(bytes=2 * x.nbytes + weight_bytes, flops=4 * x.numel())


@rms_norm.sample_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name, shape, *, weight_dtype=dtype, offset=0.0, std=1.0, layout=lambda x: x) -> Sample:
        def make():
            rng = _samples.generator(name)
            x = layout(_samples.normal(shape, dtype, device, rng, std))
            weight = None if weight_dtype is None else _samples.normal(x.shape[-1:], weight_dtype, device, rng)
            return (x, weight, 1e-6), {"weight_offset": offset}

        return Sample(name, make)

    yield sample("zero tokens", (0, 64))
    yield sample("one token", (1, 128))
    yield sample("odd hidden size", (3, 77))
    yield sample("one element a row", (5, 1))
    yield sample("one dimension", (96,))
    yield sample("no weight", (4, 64), weight_dtype=None)
    yield sample("Gemma: weight + 1", (4, 256), offset=1.0)
    yield sample("Gemma: weight + 1, fp32 weight", (4, 256), weight_dtype=torch.float32, offset=1.0)
    yield sample("strided rows", (7, 96), layout=_samples.row_view)
    yield sample("strided columns", (7, 96), layout=_samples.column_major)
    yield sample("per head", (5, 4, 128))
    yield sample("per head, rows of a wider tensor", (5, 4, 128), layout=heads_of_a_wider_row)
    yield sample("heads before tokens in memory", (4, 5, 64), layout=lambda x: x.transpose(0, 1))
    yield sample("large values", (2, 64), std=100.0)
    yield sample("rows as small as epsilon", (2, 64), std=1e-3)
    yield sample("Qwen3-8B hidden size", (2, 4096))


def heads_of_a_wider_row(x: torch.Tensor) -> torch.Tensor:
    """The same values [tokens, heads, size] as the left part of wider rows, like heads of a fused projection."""
    return _samples.row_view(x.flatten(1)).unflatten(1, x.shape[1:])


@rms_norm.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    ones = {"dtype": dtype, "device": device}
    yield Sample("a weight of one element", lambda: ((torch.ones(3, 64, **ones), torch.ones(1, **ones), 1e-6), {}))
    yield Sample("a weight a token", lambda: ((torch.ones(3, 64, **ones), torch.ones(3, 64, **ones), 1e-6), {}))
    yield Sample("a strided weight", lambda: ((torch.ones(3, 64, **ones), torch.ones(128, **ones)[::2], 1e-6), {}))


@rms_norm.bench_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(num_tokens: int, hidden_size: int) -> Sample:
        def make():
            rng = _samples.generator(f"{num_tokens} {hidden_size}", device)
            x = _samples.normal((num_tokens, hidden_size), dtype, device, rng)
            return (x, _samples.normal((hidden_size,), dtype, device, rng), 1e-6), {}

        return Sample(f"T{num_tokens} H{hidden_size}", make)

    for num_tokens in _samples.bench_tokens(device):
        yield sample(num_tokens, 4096)
    yield sample(_samples.bench_tokens(device)[-2], 8192)


@rms_norm.property_
def scale_invariant(run, device: str, dtype: torch.dtype) -> None:
    """Without epsilon, multiplying the input by a power of two changes no bit of the result."""
    x = _samples.normal((4, 64), dtype, device, _samples.generator("scale"))
    _properties.equal("a larger input changes the result", run(x * 4, None, 0.0), run(x, None, 0.0))


_properties.rows_are_independent(rms_norm, lambda run, x: run(x, x[0], 1e-6))
