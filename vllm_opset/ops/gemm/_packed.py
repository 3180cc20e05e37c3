"""Sample inputs of linear with weights of 4 bits, packed in bytes."""

from collections.abc import Iterator

import torch

from vllm_opset.ops import _samples
from vllm_opset.ops.contract import Sample
from vllm_opset.ops.gemm._quantised import ROUNDED_FACTORS
from vllm_opset.ops.schemes import UINT4, packed

# The standard deviation of values from 0 to 15 that are all as frequent.
VALUES_STD = 4.6


def random_weight(
    out_features: int,
    in_features: int,
    group: int,
    dtype: torch.dtype,
    device: str,
    rng: torch.Generator,
    zero_point: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """A packed weight, its scales in `dtype` and its zero points. Products with normal activations are of order 1.

    Scales differ up to four times from group to group. The first zero points are the least and the largest.
    """
    shape = (out_features, -(-in_features // group))
    weight = torch.randint(0, 16, (out_features, in_features), generator=rng, device=rng.device).to(device)
    spread = torch.rand(shape, generator=rng, device=rng.device).to(device) * 0.75 + 0.25
    scale = (spread * in_features**-0.5 / VALUES_STD).to(dtype)
    if not zero_point:
        return packed(weight, UINT4), scale, None
    zeros = torch.randint(4, 12, shape, generator=rng, device=rng.device).to(device, torch.uint8)
    zeros.flatten()[:2] = torch.tensor([0, 15], dtype=torch.uint8)
    return packed(weight, UINT4), scale, zeros


def samples(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(
        name,
        num_tokens,
        in_features,
        out_features,
        group,
        *,
        zero_point=False,
        bias=False,
        scale_dtype=dtype,
        layout=lambda x: x,
        scale_layout=lambda scale: scale,
    ) -> Sample:
        def make():
            rng = _samples.generator(name)
            weight, scale, zeros = random_weight(out_features, in_features, group, scale_dtype, device, rng, zero_point)
            x = layout(_samples.normal((num_tokens, in_features), dtype, device, rng))
            arguments = x, weight, _samples.normal((out_features,), dtype, device, rng) if bias else None
            return arguments, {"weight_scale": scale_layout(scale), "out_dtype": dtype, "weight_zero_point": zeros}

        return Sample(name, make, ROUNDED_FACTORS)

    yield sample("int4, zero tokens", 0, 64, 48, 32)
    yield sample("int4 by groups of 32, one token", 1, 96, 48, 32)
    yield sample("int4 by groups of 32, zero points, bias", 5, 96, 48, 32, zero_point=True, bias=True)
    yield sample("int4 by groups of 64, zero points", 3, 192, 33, 64, zero_point=True)
    yield sample("int4 by groups of 128", 17, 384, 80, 128)
    yield sample("int4 by groups of 128, zero points, one token, bias", 1, 1024, 64, 128, zero_point=True, bias=True)
    yield sample("int4, one group", 2, 128, 48, 128, zero_point=True)
    yield sample("int4 per row, an odd number of tokens", 7, 160, 72, 160, bias=True)
    yield sample("int4 per row, scales in fp32", 1, 96, 40, 96, scale_dtype=torch.float32)
    yield sample("int4, the last group is incomplete", 3, 160, 40, 64, zero_point=True)
    yield sample("int4, one output", 2, 128, 1, 64, zero_point=True)
    yield sample("int4 by groups of 16, zero points", 5, 64, 48, 16, zero_point=True)
    yield sample("int4 by groups of 2", 3, 64, 48, 2)
    yield sample("int4, long sums of many tokens", 70, 2048, 32, 128, zero_point=True)
    yield sample("int4, more tokens than a tile has", 1030, 64, 32, 32, zero_point=True, bias=True)
    yield sample("int4, strided rows", 5, 128, 48, 128, layout=_samples.row_view)
    by_columns = {"zero_point": True, "scale_layout": _samples.column_major}
    yield sample("int4, scales by columns, zero points by rows", 5, 256, 48, 64, **by_columns)
    yield sample("int4, strided columns", 5, 128, 48, 128, layout=_samples.column_major)


def illegal_samples(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls whose only fault is a scale, a zero point or a width."""

    def sample(name: str, scale: tuple[int, int] | None = (64, 2), **options) -> Sample:
        def make():
            weight = torch.zeros(64, 128, dtype=torch.uint8, device=device)
            found = {"weight_scale": None if scale is None else torch.ones(scale, device=device), "out_dtype": dtype}
            made = {key: value(device) if callable(value) else value for key, value in options.items()}
            return (made.pop("x", torch.ones(3, 256, dtype=dtype, device=device)), weight), found | made

        return Sample(name, make)

    def zeros(*shape: int, dtype: torch.dtype = torch.uint8):
        return lambda device: torch.zeros(shape, dtype=dtype, device=device)

    yield sample("int4, x as wide as the bytes", x=zeros(3, 128, dtype=dtype))
    yield sample("int4 without scales", None)
    yield sample("int4, one scale for all", (1, 1))
    yield sample("int4, scales of the weight's transpose", (2, 64))
    yield sample("int4, scales for five parts of a row", (64, 5))
    yield sample("int4, zero points of another granularity", weight_zero_point=zeros(64, 1))
    yield sample("int4, zero points in another dtype", weight_zero_point=zeros(64, 2, dtype=torch.int8))
    yield sample("int4 without the dtype of the result", out_dtype=None)
    yield sample("MXFP4, which experts alone have", weight_scale=zeros(64, 8))
