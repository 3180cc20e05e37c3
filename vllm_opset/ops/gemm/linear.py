"""linear: the projection of activations by a weight, with or without a bias.

Semantics: `torch.nn.functional.linear`. Quantised weights and activations are multiplied as the values that they stand
for. vLLM's linear layers and LM heads call this op.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops._strides import check_contiguous
from vllm_opset.ops.contract import Cost, Problem, Sample, Tolerance, accumulator, op
from vllm_opset.ops.gemm import _linear_draws, _packed, _quantised
from vllm_opset.ops.schemes import (
    FP8,
    INT8,
    NONE,
    PACKED,
    WHOLE,
    Scheme,
    dequantise,
    group_of,
    is_mxfp4,
    quantised,
    values_shape,
)
from vllm_opset.targets import WGMMA

PARTIAL_SUMS = "fp32 in another order; PyTorch lets a GPU round partial sums, which are of order 1, to the dtype"
TOLERANCES = {
    torch.float64: Tolerance(1e-12, 1e-12, "fp64 throughout"),
    torch.float32: Tolerance(2e-6, 1e-5, "thousands of products, summed in fp32 in another order"),
    torch.bfloat16: Tolerance(2**-7, 2**-8, PARTIAL_SUMS),
    torch.float16: Tolerance(2**-10, 2**-11, PARTIAL_SUMS),
}
# Hopper's tensor cores cut products of fp8 where these bits of the sum so far end, or of a larger product.
FP8_SUM_BITS = 14
PREPARED = ("weight", "weight_scale", "out_dtype", "weight_zero_point")


@dataclass(frozen=True)
class LinearProblem(Problem):
    """dtype: of the result. scheme: how the weight and the activations are stored."""

    in_features: int
    out_features: int
    scheme: Scheme = NONE


@op(problem=LinearProblem, prepared=PREPARED, tolerances=TOLERANCES)
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    weight_zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x weightᵀ + bias, summed in fp32 and rounded once.

    x: [..., in_features], any strides. weight: [out_features, in_features], rows dense. bias: [out_features],
    contiguous, or None. All of one dtype. Returns a new contiguous tensor [..., out_features] of that dtype. Zero rows
    are allowed.

    A quantised weight comes with its weight_scale, fp32, whose shape says its granularity (see `ops/schemes`), and
    stands for weight * weight_scale. Then out_dtype is the dtype of the bias and the result, and x is of that dtype. Or
    x is quantised too: [num_tokens, in_features] with its x_scale, fp32, and it stands for x * x_scale.

    Quantised values are in fp8 e4m3 or int8.

    A weight of 4 bits is packed in bytes, uint8 [out_features, in_features / 2] (see `ops/schemes`), with a
    weight_scale [out_features, groups] in fp32 or out_dtype. It may have a weight_zero_point, uint8 of the scale's
    shape, and then stands for (weight - weight_zero_point) * weight_scale. x is of out_dtype.

    Raises ValueError for widths or dtypes that differ, a bias that is not [out_features] (it would broadcast
    unnoticed) or not contiguous, a scale whose granularity does not divide its tensor, zero points without a packed
    weight or of another shape than its scale's, an x_scale without a weight_scale, and weights in MXFP4.
    """
    check_arguments(x, weight, bias, weight_scale, x_scale, out_dtype, weight_zero_point)
    if weight_scale is None:
        return F.linear(x, weight, bias).contiguous()
    wide = accumulator(x.new_empty(0, dtype=out_dtype))
    bias = None if bias is None else bias.to(wide)
    weight = dequantise(weight, weight_scale, wide, weight_zero_point)
    return F.linear(dequantise(x, x_scale, wide), weight, bias).to(out_dtype)


def check_arguments(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    weight_zero_point: torch.Tensor | None = None,
) -> None:
    """Raises ValueError for what the contract forbids.

    weight may be as a kernel prepared it: of the shape that the contract gives it, or, if it was packed, dequantised.
    """
    same_dtype = x.dtype == weight.dtype or weight_scale is not None
    if x.shape[-1:] != values_shape(weight)[1:] or not same_dtype:
        raise ValueError(f"x {x.dtype} {list(x.shape)} cannot be multiplied by {weight.dtype} {list(weight.shape)}")
    if weight_scale is not None:
        _check_quantised(x, weight, weight_scale, x_scale, out_dtype)
        quantised(weight, weight_scale, weight_zero_point)
    elif x_scale is not None:
        raise ValueError("x with an x_scale needs a quantised weight, and this one has no weight_scale")
    dtype = x.dtype if weight_scale is None else out_dtype
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype is not dtype):
        raise ValueError(f"bias must be {dtype} [{weight.shape[0]}], not {bias.dtype} {list(bias.shape)}")
    check_contiguous(bias=bias)
    if weight_zero_point is not None and (weight_scale is None or weight.dtype in (FP8, INT8)):
        raise ValueError(f"only a packed weight has zero points, not one in {weight.dtype}")


def _check_quantised(x, weight, weight_scale, x_scale, out_dtype) -> None:
    if is_mxfp4(weight, weight_scale):
        raise ValueError("experts alone have MXFP4 weights, and linear multiplies by none")
    if out_dtype is None:
        raise ValueError("a quantised weight needs out_dtype")
    if x_scale is None and x.dtype != out_dtype:
        raise ValueError(f"x is {x.dtype} without an x_scale, and must be {out_dtype}, the dtype of the result")
    if x_scale is not None:
        if weight.dtype is PACKED:
            raise ValueError("a packed weight multiplies activations as they are, without an x_scale")
        group_of(x.shape, x_scale.shape)


@linear.problem_of
def _(x, weight, bias=None, weight_scale=None, x_scale=None, out_dtype=None, weight_zero_point=None) -> LinearProblem:
    scheme = NONE
    if weight_scale is not None:
        scheme = Scheme(quantised(weight, weight_scale, weight_zero_point), quantised(x, x_scale))
    out_features, in_features = values_shape(weight)
    return LinearProblem(x.device.type, out_dtype or x.dtype, in_features, out_features, scheme)


@linear.hardware_error
def _(problem: LinearProblem) -> float:
    """The error of sums of fp8 on Hopper: the square root of the columns, times 2 to the power of -FP8_SUM_BITS.

    Its tensor cores cut each product toward zero, on average by half of the last of these bits. Products are of both
    signs. So the errors add up like the steps of a random walk. Emulated sums of order 1 had 1,024 to 57,344 columns.
    Their standard deviation is 0.3 to 0.45 of this error. The largest of a million is twice this error for results near
    0, and more for larger ones. bfloat16's own tolerance covers the second half. That of float16 does not.

    Scales by blocks end a sum after 128 columns. For results in fp32, kernels widen both factors.
    """
    stored = problem.scheme.weight, problem.scheme.activation
    fp8_sums = all(one is not None and one.dtype is FP8 and one.group.columns == WHOLE for one in stored)
    if not fp8_sums or problem.dtype.itemsize > 2 or WGMMA not in problem.target.features:
        return 0.0
    error = problem.in_features**0.5 * 2.0**-FP8_SUM_BITS
    return 2 * error if problem.dtype is torch.float16 else error


@linear.cost
def _(x, weight, bias=None, weight_scale=None, x_scale=None, out_dtype=None, weight_zero_point=None) -> Cost:
    num_tokens, out_features = x.numel() // x.shape[-1], weight.shape[0]
    others = (bias, weight_scale, x_scale, weight_zero_point)
    parameters = weight.nbytes + sum(0 if other is None else other.nbytes for other in others)
    results = num_tokens * out_features
    result_bytes = results * (out_dtype or x.dtype).itemsize
    factors = None if x_scale is None else x.dtype
    return Cost(bytes=x.nbytes + parameters + result_bytes, flops=2 * results * x.shape[-1], factors=factors)


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
    yield from _quantised.samples(device, dtype)
    yield from _packed.samples(device, dtype)


@linear.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name: str, *shapes: tuple[int, ...], **others: torch.Tensor) -> Sample:
        return Sample(name, lambda: (tuple(torch.ones(s, dtype=dtype, device=device) for s in shapes), others))

    another = torch.ones(32, dtype=torch.float32 if dtype is torch.float16 else torch.float16, device=device)

    strided = torch.ones(64, dtype=dtype, device=device)[::2]
    for num_tokens in (1, 16, 80):
        yield sample(f"a bias of one element, {num_tokens} tokens", (num_tokens, 64), (32, 64), (1,))
        yield sample(f"a strided bias, {num_tokens} tokens", (num_tokens, 64), (32, 64), bias=strided)
        yield sample(f"too wide, {num_tokens} tokens", (num_tokens, 72), (32, 64))
        yield sample(f"too narrow, {num_tokens} tokens", (num_tokens, 56), (32, 64))
        yield sample(f"a bias in another dtype, {num_tokens} tokens", (num_tokens, 64), (32, 64), bias=another)
    yield sample("a bias a token", (16, 64), (32, 64), (16, 32))
    yield sample("a scale of x alone", (16, 64), (32, 64), x_scale=torch.ones(1, 1, device=device))
    yield from _quantised.illegal_samples(device, dtype)
    yield from _packed.illegal_samples(device, dtype)


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


linear.random_input(_linear_draws.draw)

_properties.rows_are_independent(linear, lambda run, x: run(x, torch.eye(64, dtype=x.dtype, device=x.device)))
