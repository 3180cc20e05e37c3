"""Quantised weights that stay as they are stored give the bits of the same weights dequantised once."""

import pytest
import torch

from vllm_opset import kernel
from vllm_opset.ops import _samples
from vllm_opset.ops.gemm._packed import random_weight
from vllm_opset.ops.moe._quantised import int4_experts, rounded_experts, weight_of
from vllm_opset.ops.schemes import (
    FP4,
    FP8,
    INT8,
    MXFP4,
    PER_ROW,
    PER_TENSOR,
    GroupShape,
    dequantise,
    scales_of,
    stored,
)

if reason := kernel.unavailable().get("cpp"):
    pytest.skip(f"no C++ kernels here, until g++ 12 is installed: {reason}", allow_module_level=True)

from vllm_opset.kernels.cpp import linear as in_cpp

LINEAR, EXPERTS = kernel.kernels_of("linear")["cpp"], kernel.kernels_of("fused_experts")["cpp"]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# The dtype and the group of a weight; for int4, the columns of a group, and whether there are zero points.
EIGHT_BITS = [(to, group) for to in (FP8, INT8) for group in (PER_TENSOR, PER_ROW, GroupShape(128, 128))]
INT4 = [(32, True), (64, False), (512, True)]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return _samples.normal(shape, dtype, "cpu", _samples.generator(f"stored {shape}"))


def eight_bits(rows: int, columns: int, to: torch.dtype, group: GroupShape) -> tuple:
    values = normal(rows, columns) * torch.linspace(0.1, 1, rows)[:, None]
    scale = scales_of(values, to, group)
    return stored(values, scale, to), scale, None


def int4(rows: int, columns: int, group: int, zero_point: bool, dtype: torch.dtype) -> tuple:
    return random_weight(rows, columns, group, dtype, "cpu", _samples.generator("int4"), zero_point)


def products(weight, scale, zero_point, dtype, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Those with a weight as it is stored, and with the weight that it stands for."""
    how = {"weight_scale": scale, "out_dtype": dtype}
    how |= {} if zero_point is None else {"weight_zero_point": zero_point}
    plain = dequantise(weight, scale, dtype, zero_point)
    x, bias = normal(num_tokens, plain.shape[1], dtype=dtype), normal(len(plain), dtype=dtype)
    prepared = LINEAR.prepared("weight", weight, **how)
    stays = dtype is torch.float32 or in_cpp.MULTIPLIES_BF16
    assert (prepared.dtype, prepared.nbytes) == (weight.dtype, weight.nbytes) or not stays
    return LINEAR.run(x, prepared, bias, **how), LINEAR.run(x, LINEAR.prepared("weight", plain), bias)


@DTYPES
@pytest.mark.parametrize("num_tokens", [1, 5, 16, 27])
@pytest.mark.parametrize("form", [*EIGHT_BITS, *INT4], ids=str)
def test_linear_gives_the_bits_of_the_dequantised_weight(form, num_tokens, dtype):
    weight = int4(400, 512, *form, dtype) if form in INT4 else eight_bits(400, 512, *form)
    assert torch.equal(*products(*weight, dtype, num_tokens))


@pytest.mark.parametrize("num_tokens", [2, 12])
@pytest.mark.parametrize("form", EIGHT_BITS, ids=str)
def test_rows_that_fill_no_register_and_no_block(form, num_tokens):
    assert torch.equal(*products(*eight_bits(301, 203, *form), torch.float32, num_tokens))


@DTYPES
def test_scales_and_zero_points_may_have_any_strides(dtype):
    weight, *others = int4(400, 512, 64, True, dtype)
    strided = [one.T.contiguous().T for one in others]
    assert not any(one.is_contiguous() for one in strided)
    assert torch.equal(*products(weight, *strided, dtype, 5))


def test_many_tokens_are_multiplied_by_blocks_of_rows(monkeypatch):
    monkeypatch.setattr(in_cpp, "BLOCK_BYTES", 4 * 203 * 64)
    found, expected = products(*eight_bits(301, 203, FP8, GroupShape(128, 128)), torch.float32, 40)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def nan_in_a_weight(weight: torch.Tensor, scale: torch.Tensor) -> None:
    weight.view(torch.uint8)[3, 5] = 0xFF


def a_large_scale(weight: torch.Tensor, scale: torch.Tensor) -> None:
    scale[7] = -1e3


def a_scale_that_is_nan(weight: torch.Tensor, scale: torch.Tensor) -> None:
    scale[7] = torch.nan


@DTYPES
@pytest.mark.parametrize("change", [nan_in_a_weight, a_large_scale, a_scale_that_is_nan])
def test_unusual_fp8_is_dequantised_once(change, dtype):
    weight, scale, _ = eight_bits(400, 512, FP8, PER_ROW)
    change(weight, scale)
    how = {"weight_scale": scale, "out_dtype": dtype}
    assert LINEAR.prepared("weight", weight, **how).dtype is dtype
    x = normal(3, 512, dtype=dtype)
    expected = LINEAR.call(x, dequantise(weight, scale, dtype))
    torch.testing.assert_close(LINEAR.call(x, weight, **how), expected, rtol=0, atol=0, equal_nan=True)


def test_columns_with_scales_of_their_own_make_no_pairs():
    weight, scale, _ = eight_bits(32, 64, INT8, GroupShape(-1, 1))
    assert torch.equal(*(products(weight, scale, None, torch.float32, 3)))
    assert LINEAR.prepared("weight", weight, weight_scale=scale, out_dtype=torch.bfloat16).dtype is torch.bfloat16


def experts(shape: tuple[int, ...], form: tuple, dtype: torch.dtype) -> tuple:
    values = normal(*shape, dtype=dtype)
    if form in INT4:
        return int4_experts(values, *form, _samples.generator("int4"))
    to, group = form
    return *rounded_experts(values.float(), group, to), None


@DTYPES
@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("form", [*EIGHT_BITS, *INT4, (FP4, MXFP4.group)], ids=str)
def test_experts_give_the_bits_of_the_dequantised_weights(form, num_tokens, dtype):
    hidden, width, number = (512, 512, 3) if form in INT4 or form[0] is FP4 else (203, 141, 3)
    names, plain, how, given = ("", "_scale", "_zero_point"), [], {"out_dtype": dtype}, {}
    for name, shape in (("w1", (number, 2 * width, hidden)), ("w2", (number, hidden, width))):
        parts = experts(shape, form, dtype)
        weight, scale, zero_point = parts
        plain.append(torch.stack([weight_of(weight, scale, e, dtype, zero_point) for e in range(number)]))
        given[name] = weight
        how |= {name + part: one for part, one in zip(names, parts, strict=True) if part and one is not None}
    kept = [EXPERTS.prepared(name, weight, **how) for name, weight in given.items()]
    assert all(weight is given[name] for name, weight in zip(given, kept, strict=True))
    ids = torch.stack([torch.randperm(number, generator=_samples.generator("ids"))[:2] for _ in range(num_tokens)])
    x, weights, ids = normal(num_tokens, hidden, dtype=dtype), torch.full((num_tokens, 2), 0.5), ids.int()
    found = EXPERTS.run(x, *kept, weights, ids, **how)
    assert torch.equal(found, EXPERTS.run(x, *plain, weights, ids))


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float64])
def test_fp8_with_scales_that_cpp_does_not_read_is_dequantised(scale_dtype):
    weight, scale, _ = eight_bits(32, 64, FP8, PER_ROW)
    how = {"weight_scale": scale.to(scale_dtype), "out_dtype": torch.float32}
    prepared = LINEAR.prepared("weight", weight, **how)
    torch.testing.assert_close(prepared, dequantise(weight, scale, torch.float32), rtol=1e-3, atol=0)
