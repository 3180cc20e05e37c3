"""linear: the projection of activations by a weight, with or without a bias.

Semantics: `torch.nn.functional.linear`. vLLM's layers with unquantised weights call it, language model heads included.
"""

import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops.contract import Cost, Problem, Sample, Tolerance, op

PARTIAL_SUMS = "fp32 in another order; PyTorch lets a GPU round partial sums, which are of order 1, to the dtype"
TOLERANCES = {
    torch.float64: Tolerance(1e-12, 1e-12, "fp64 throughout"),
    torch.float32: Tolerance(2e-6, 1e-5, "thousands of products, summed in fp32 in another order"),
    torch.bfloat16: Tolerance(2**-7, 2**-8, PARTIAL_SUMS),
    torch.float16: Tolerance(2**-10, 2**-11, PARTIAL_SUMS),
}


@op(prepared=("weight",), tolerances=TOLERANCES)
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x weightᵀ + bias, summed in fp32 and rounded once.

    x: [..., in_features], any strides. weight: [out_features, in_features], rows dense. bias: [out_features] or None.
    All of one dtype. Returns a new contiguous tensor [..., out_features] of that dtype. Zero rows are allowed.
    Raises ValueError if widths or dtypes differ, or if bias is not [out_features] and would broadcast unnoticed.
    """
    check_arguments(x, weight, bias)
    return F.linear(x, weight, bias).contiguous()


def check_arguments(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if x.shape[-1:] != weight.shape[1:] or x.dtype != weight.dtype:
        raise ValueError(f"x {x.dtype} {list(x.shape)} cannot be multiplied by {weight.dtype} {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}], not {list(bias.shape)}")


@linear.problem_of
def _(x, weight, bias=None) -> Problem:
    return Problem(x.device.type, x.dtype)


@linear.cost
def _(x, weight, bias=None) -> Cost:
    num_tokens, out_features = x.numel() // x.shape[-1], weight.shape[0]
    parameters = weight.nbytes + (0 if bias is None else bias.nbytes)
    results = num_tokens * out_features
    return Cost(bytes=x.nbytes + parameters + results * x.element_size(), flops=2 * results * x.shape[-1])


@linear.sample_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def sample(name, shape, out_features, *, bias=False, layout=as_it_is, weight_layout=as_it_is) -> Sample:
        def make():
            rng = _samples.generator(name)
            x = layout(_samples.normal(shape, dtype, device, rng))
            weight = _samples.normal((out_features, shape[-1]), dtype, device, rng, std=shape[-1] ** -0.5)
            weight = weight_layout(weight)
            return (x, weight, _samples.normal((out_features,), dtype, device, rng) if bias else None), {}

        return Sample(name, make)

    yield sample("zero tokens", (0, 64), 32)
    # Kernels may treat one, few and many tokens in different ways, each with and without a bias.
    for num_tokens in (1, 2, 16, 80):
        yield sample(f"{num_tokens} tokens", (num_tokens, 128), 192)
        yield sample(f"{num_tokens} tokens, bias", (num_tokens, 128), 192, bias=True)
    # These weights do not fit in the cache of one core.
    yield sample("large weight", (16, 640), 512)
    yield sample("large weight, bias", (16, 640), 512, bias=True)
    yield sample("large weight, long sums", (20, 4096), 61)
    yield sample("one token, long sums", (1, 5120), 61, bias=True)
    yield sample("odd features", (3, 77), 33, bias=True)
    yield sample("odd features of one token", (1, 77), 33, bias=True)
    yield sample("one output", (16, 64), 1, bias=True)
    yield sample("strided rows", (16, 96), 48, layout=_samples.row_view)
    yield sample("one strided row", (1, 96), 48, layout=_samples.row_view)
    yield sample("strided columns of one row", (1, 96), 48, layout=lambda x: _samples.row_view(x.mT).mT)
    yield sample("a weight in a wider one", (1, 96), 48, weight_layout=_samples.row_view)
    yield sample("strided columns", (16, 96), 48, layout=_samples.column_major)
    yield sample("three dimensions", (2, 3, 64), 32, bias=True)
    yield sample("one dimension", (64,), 32, bias=True)
    yield sample("Qwen3-0.6B down projection", (2, 3072), 1024)


@linear.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name: str, *shapes: tuple[int, ...]) -> Sample:
        return Sample(name, lambda: (tuple(torch.ones(s, dtype=dtype, device=device) for s in shapes), {}))

    for num_tokens in (1, 16, 80):
        yield sample(f"a bias of one element, {num_tokens} tokens", (num_tokens, 64), (32, 64), (1,))
        yield sample(f"too wide, {num_tokens} tokens", (num_tokens, 72), (32, 64))
        yield sample(f"too narrow, {num_tokens} tokens", (num_tokens, 56), (32, 64))
    yield sample("a bias a token", (16, 64), (32, 64), (16, 32))


@linear.bench_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(num_tokens: int, in_features: int, out_features: int) -> Sample:
        def make():
            rng = _samples.generator(f"{num_tokens} {out_features}", device)
            x = _samples.normal((num_tokens, in_features), dtype, device, rng)
            return (x, _samples.normal((out_features, in_features), dtype, device, rng)), {}

        return Sample(f"T{num_tokens} {in_features} to {out_features}", make)

    if device == "cpu":  # Qwen3-0.6B, a model that a CPU can serve
        tokens, shapes = _samples.bench_tokens(device), ((1024, 6144), (3072, 1024))
    else:  # decode steps of Qwen3-8B; prompts always go to PyTorch
        tokens, shapes = (1, 64), ((4096, 4096), (4096, 6144), (4096, 24576), (12288, 4096), (4096, 151936))
    for num_tokens in tokens:
        for shape in shapes:
            yield sample(num_tokens, *shape)


@linear.random_input
def _(device: str, dtype: torch.dtype, choices: random.Random) -> Sample:
    """A layer of a model of 0.5 to 8 billion parameters, with few rows, as in decode steps."""
    num_tokens = choices.choice((1, 1, 2, 4, 8, 16, 64))
    in_features, out_features = (64 * choices.randint(8, 64 if device == "cpu" else 192) for _ in range(2))

    def make() -> tuple[tuple, dict]:
        rng = _samples.generator(f"{num_tokens} {in_features} {out_features}", device)
        x = _samples.normal((num_tokens, in_features), dtype, device, rng)
        return (x, _samples.normal((out_features, in_features), dtype, device, rng)), {}

    return Sample(f"T{num_tokens} {in_features} to {out_features}", make)


_properties.rows_are_independent(linear, lambda run, x: run(x, torch.eye(64, dtype=x.dtype, device=x.device)))
