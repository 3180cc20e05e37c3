"""Sample inputs of linear with quantised weights, and of the quantisation itself."""

from collections.abc import Iterator

import torch

from vllm_opset.ops import _samples
from vllm_opset.ops.contract import Sample
from vllm_opset.ops.quantisation.quantise import as_result
from vllm_opset.ops.schemes import FP8, INT8, PER_ROW, PER_TENSOR, WHOLE, GroupShape, scales_of, stored

BLOCK = GroupShape(128, 128)
TOKEN_BLOCK = GroupShape(1, 128)
# Rounding each weight and activation to the result's dtype before the product moves sums of order 1 by some 0.002 in
# bf16, and by six times as much once in thousands. A kernel may do so.
ROUNDED_FACTORS = 4.0


def quantised_normal(
    shape: tuple[int, ...],
    group: GroupShape,
    device: str,
    rng: torch.Generator,
    std: float = 1.0,
    dtype: torch.dtype = FP8,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random values in fp8 or int8 with their scales. Each row is larger than the last, so that scales differ."""
    values = _samples.normal(shape, torch.float32, device, rng, std)
    values *= torch.linspace(0.25, 1, shape[0], device=device)[:, None]
    scale = scales_of(values, dtype, group)
    if group.rows == 1:  # Kernels are timed with scales of activations that lie in memory as those of `quantise`.
        scale = as_result(scale, shape, group)
    return stored(values, scale, dtype), scale


def samples(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(
        name, num_tokens, in_features, out_features, weight_group, x_group=None, bias=False, stored_dtype=FP8
    ) -> Sample:
        def make():
            rng = _samples.generator(name)
            weight, weight_scale = quantised_normal(
                (out_features, in_features), weight_group, device, rng, in_features**-0.5, stored_dtype
            )
            x, x_scale = _samples.normal((num_tokens, in_features), dtype, device, rng), None
            if x_group is not None:
                x, x_scale = quantised_normal((num_tokens, in_features), x_group, device, rng, dtype=stored_dtype)
            arguments = x, weight, _samples.normal((out_features,), dtype, device, rng) if bias else None
            return arguments, {"weight_scale": weight_scale, "x_scale": x_scale, "out_dtype": dtype}

        return Sample(name, make, ROUNDED_FACTORS)

    yield sample("fp8 weight per tensor", 5, 96, 48, PER_TENSOR)
    yield sample("fp8 weight per channel, bias", 5, 96, 48, PER_ROW, bias=True)
    yield sample("fp8 weight by blocks", 5, 256, 192, BLOCK)
    yield sample("fp8 weight by incomplete blocks, bias", 3, 200, 150, BLOCK, bias=True)
    yield sample("fp8 per tensor, zero tokens", 0, 96, 48, PER_TENSOR, PER_TENSOR)
    yield sample("fp8 per tensor", 5, 96, 48, PER_TENSOR, PER_TENSOR, bias=True)
    yield sample("fp8 per channel and token", 17, 160, 80, PER_ROW, PER_ROW)
    yield sample("fp8 per channel and token, one token, bias", 1, 640, 512, PER_ROW, PER_ROW, bias=True)
    yield sample("fp8 per channel and token, odd features", 3, 77, 33, PER_ROW, PER_ROW, bias=True)
    yield sample("fp8 by blocks", 17, 384, 256, BLOCK, TOKEN_BLOCK)
    yield sample("fp8 by incomplete blocks, bias", 3, 200, 150, BLOCK, TOKEN_BLOCK, bias=True)
    # Kernels may have tiles of their own for hundreds of tokens, and for thousands.
    yield sample("fp8 by blocks, 300 tokens, bias", 300, 256, 160, BLOCK, TOKEN_BLOCK, bias=True)
    yield sample("fp8 by blocks, 1100 tokens", 1100, 256, 144, BLOCK, TOKEN_BLOCK)
    yield sample("fp8 per channel and token, 300 tokens, bias", 300, 208, 136, PER_ROW, PER_ROW, bias=True)
    yield sample("int8 weight per channel, bias", 5, 96, 48, PER_ROW, bias=True, stored_dtype=INT8)
    yield sample("int8 per tensor", 5, 96, 48, PER_TENSOR, PER_TENSOR, bias=True, stored_dtype=INT8)
    yield sample("int8 per channel and tensor", 2, 96, 48, PER_ROW, PER_TENSOR, stored_dtype=INT8)
    rows = GroupShape(128, WHOLE)
    yield sample("int8 per channel and 128 tokens", 150, 96, 48, PER_ROW, rows, stored_dtype=INT8)
    yield sample("int8 per channel and token", 17, 160, 80, PER_ROW, PER_ROW, stored_dtype=INT8)
    yield sample("int8 per channel and token, one token", 1, 640, 512, PER_ROW, PER_ROW, stored_dtype=INT8)
    yield sample("int8 per channel and token, odd features", 3, 77, 33, PER_ROW, PER_ROW, True, stored_dtype=INT8)


def illegal_samples(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls whose only fault is a scale or a dtype."""

    def sample(name: str, weight_scale: tuple[int, int], x_scale: tuple[int, int] | None = None, **options) -> Sample:
        def make():
            ones = {"device": device}
            x = torch.ones(16, 256, **ones, dtype=dtype if x_scale is None else FP8)
            scales = {"weight_scale": torch.ones(weight_scale, **ones)}
            if x_scale is not None:
                scales["x_scale"] = torch.ones(x_scale, **ones)
            return (x, torch.ones(64, 256, **ones).to(FP8)), scales | {"out_dtype": dtype} | options

        return Sample(name, make)

    yield sample("fp8, a scale for each of five parts", (5, 1))
    yield sample("fp8, a scale of the weight's transpose", (3, 64))
    yield sample("fp8, a scale for another number of tokens", (1, 1), (11, 1))
    yield sample("fp8 without the dtype of the result", (1, 1), out_dtype=None)
    yield sample("fp8 with a bias in another dtype", (1, 1), bias=torch.ones(64, device=device, dtype=FP8))
