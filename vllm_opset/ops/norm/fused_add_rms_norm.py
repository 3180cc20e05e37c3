"""fused_add_rms_norm: adds to the residual stream and normalises the sum, in one pass over both.

Semantics: vLLM's IR op `fused_add_rms_norm`. vLLM's `RMSNorm` and `GemmaRMSNorm` (with `weight_offset=1`) call it when
they are given a residual. It normalises the fp32 sum, before the sum is rounded for the residual.
"""

from collections.abc import Iterator

import torch

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops.contract import Cost, Sample, accumulator, op
from vllm_opset.ops.norm.rms_norm import RMSNormProblem, check_parameter, rms_norm


@op(problem=RMSNormProblem, mutates=("x", "residual"))
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    weight_offset: float = 0.0,
) -> None:
    """residual <- x + residual; x <- rms_norm(x + residual, weight, epsilon, weight_offset), both in place.

    The sum is formed in fp32. The residual stores it rounded to its dtype; the norm uses it unrounded.

    x, residual: [..., hidden_size], of one shape and dtype, any strides. weight, epsilon, weight_offset: as `rms_norm`.
    Zero rows are allowed. Returns nothing.
    Raises ValueError if x and the residual differ in shape or dtype, or the weight is not [hidden_size].
    """
    check_arguments(x, residual, weight)
    total = x.to(accumulator(x)) + residual
    residual.copy_(total)
    x.copy_(rms_norm(total, weight, epsilon, weight_offset))


def check_arguments(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None) -> None:
    """Refuses shapes that would broadcast unnoticed."""
    if x.shape != residual.shape or x.dtype != residual.dtype:
        both = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (x, residual))
        raise ValueError(f"x and residual must have one shape and dtype, not {' and '.join(both)}")
    check_parameter(weight, x)


@fused_add_rms_norm.problem_of
def _(x, residual, weight, epsilon, weight_offset=0.0) -> RMSNormProblem:
    return RMSNormProblem(x.device.type, x.dtype, x.shape[-1], None if weight is None else weight.dtype)


@fused_add_rms_norm.cost
def _(x, residual, weight, epsilon, weight_offset=0.0) -> Cost:
    weight_bytes = 0 if weight is None else weight.nbytes
    return Cost(bytes=2 * x.nbytes + 2 * residual.nbytes + weight_bytes, flops=5 * x.numel())


@fused_add_rms_norm.sample_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name, shape, *, weight_dtype=dtype, offset=0.0, std=1.0, layout=lambda x: x) -> Sample:
        def make():
            rng = _samples.generator(name)
            x, residual = (layout(_samples.normal(shape, dtype, device, rng, std)) for _ in range(2))
            weight = None if weight_dtype is None else _samples.normal(x.shape[-1:], weight_dtype, device, rng)
            return (x, residual, weight, 1e-6), {"weight_offset": offset}

        return Sample(name, make, scale=max(1.0, std))

    yield sample("zero tokens", (0, 64))
    yield sample("one token", (1, 128))
    yield sample("odd hidden size", (3, 77))
    yield sample("one element a row", (5, 1))
    yield sample("no weight", (4, 64), weight_dtype=None)
    yield sample("Gemma: weight + 1", (4, 256), offset=1.0)
    yield sample("Gemma: weight + 1, fp32 weight", (4, 256), weight_dtype=torch.float32, offset=1.0)
    yield sample("strided rows", (7, 96), layout=_samples.row_view)
    yield sample("strided columns", (7, 96), layout=_samples.column_major)
    yield sample("three dimensions", (2, 3, 128))
    yield sample("large values", (2, 64), std=100.0)
    yield sample("Qwen3-8B hidden size", (2, 4096))


@fused_add_rms_norm.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name: str, residual: tuple[int, ...], weight: tuple[int, ...], wide: bool = False) -> Sample:
        def make():
            shapes = ((3, 64), residual, weight)
            x, other, scale = (torch.ones(shape, dtype=dtype, device=device) for shape in shapes)
            return (x, other.double() if wide else other, scale, 1e-6), {}

        return Sample(name, make)

    yield sample("a residual of one row", (1, 64), (64,))
    yield sample("a residual of one column", (3, 1), (64,))
    yield sample("a residual of another dtype", (3, 64), (64,), wide=True)
    yield sample("a weight of one element", (3, 64), (1,))


@fused_add_rms_norm.bench_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(num_tokens: int, hidden_size: int) -> Sample:
        def make():
            rng = _samples.generator(f"{num_tokens} {hidden_size}", device)
            x, residual = (_samples.normal((num_tokens, hidden_size), dtype, device, rng) for _ in range(2))
            return (x, residual, _samples.normal((hidden_size,), dtype, device, rng), 1e-6), {}

        return Sample(f"T{num_tokens} H{hidden_size}", make)

    for num_tokens in _samples.bench_tokens(device):
        yield sample(num_tokens, 4096)
    yield sample(_samples.bench_tokens(device)[-2], 8192)


@fused_add_rms_norm.property_
def norm_of_the_unrounded_sum(run, device: str, dtype: torch.dtype) -> None:
    """Almost all elements equal the exact result, rounded. A norm of the rounded sum misses about a third of them.

    A few may round to the other side, because kernels sum in fp32 in different orders.
    """
    rng = _samples.generator("unrounded")
    x, residual = (_samples.normal((8, 512), dtype, device, rng) for _ in range(2))
    total = x.double() + residual.double()
    run(x, residual, None, 1e-6)
    if dtype != torch.float32:
        exact = rms_norm(total, None, 1e-6).to(dtype)
        assert (x != exact).float().mean() < 0.05, "x was not normalised from the sum in fp32"
    _properties.equal("the residual is not the sum, rounded once", residual, total.to(dtype))
