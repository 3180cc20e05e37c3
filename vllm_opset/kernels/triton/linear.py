"""linear for one row and a few, as in decode steps, and for quantised weights. PyTorch does the rest.

int4 weights have four variants, here with their numbers of tokens on Hopper GPUs:

- `ring` (`_packed_linear_sm80`): 1 to 8, in groups of 128 columns and more. It serves other NVIDIA GPUs, too.
- `packed_sm90` (`_packed_gemm_sm90`): 9 to 256, and 1 to 8 where `ring` cannot.
- `packed` (`_packed_linear`): up to 128 where neither can, such as on other GPUs.
- `dequantised` (`_packed_linear`): more.

fp8 weights have three variants. On Hopper GPUs, `decode_sm90` multiplies by up to 64 tokens (`_decode_sm90`), and
`scaled_sm90` by more (`_scaled_gemm_sm90`). `scaled` does all else, and serves int8 weights as well (`_scaled_linear`).

Other weights have three variants. `one_row` sums products in registers, as fast as the weight can be read.
`decode_sm90` multiplies by up to 64 tokens on Hopper GPUs. `torch` calls PyTorch (cuBLAS), which uses the tensor cores.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import (
    _decode_sm90,
    _launch,
    _packed_gemm_sm90,
    _packed_linear,
    _packed_linear_sm80,
    _scaled_calls_sm90,
    _scaled_linear,
    _supports,
)
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._rows import num_rows
from vllm_opset.kernels.triton._scaled_calls_sm90 import Operands
from vllm_opset.ops.gemm.linear import LinearProblem, check_arguments
from vllm_opset.ops.schemes import PACKED, UINT4
from vllm_opset.variants import Variant, Variants


class Call(NamedTuple):
    """What the choice of a variant depends on.

    scaled: the weight is quantised in 8 bits. packed: it is in 4.
    hopper: `scaled_sm90` can multiply them. decode: `decode_sm90` can. decode_suits: it is also the fastest.
    few: x has few rows, so `ring` and `packed` suit a packed weight.
    ring: `ring` can multiply a packed weight. packed_hopper: `packed_sm90` can. packed_suits: it is also the fastest.
    one_row: x has one row, and the weight's rows are contiguous.
    """

    scaled: bool
    packed: bool
    hopper: bool
    decode: bool
    decode_suits: bool
    few: bool
    ring: bool
    packed_hopper: bool
    packed_suits: bool
    one_row: bool


def describe(x, weight, bias=None, weight_scale=None, x_scale=None, out_dtype=None, weight_zero_point=None) -> Call:
    packed, rows = weight.dtype is PACKED, num_rows(x)
    scaled = weight_scale is not None and not packed
    operands = Operands(x, weight, weight_scale, x_scale, out_dtype)
    hopper = scaled and _scaled_calls_sm90.can(operands)
    decode = not packed and _decode_sm90.can(operands)
    few = packed and rows <= _packed_linear.most_packed_tokens(x.device)
    ring = packed and _packed_linear_sm80.fits(x, weight, weight_scale)
    decode_suits = decode and _decode_sm90.suits(operands)
    packed_hopper = packed and _packed_gemm_sm90.fits(x, weight, weight_scale)
    packed_suits = packed_hopper and _packed_gemm_sm90.suits(x, ring)
    one_row = rows == 1 and weight.stride(1) == 1
    return Call(scaled, packed, hopper, decode, decode_suits, few, ring, packed_hopper, packed_suits, one_row)


def supports(problem: LinearProblem) -> str | None:
    """fp32, bf16 and fp16, accumulated in fp32; fp8, int8 and int4 weights, with scales for 32 columns or more."""
    stored = problem.scheme.weight
    quantised = _packed_linear if stored is not None and stored.dtype is UINT4 else _scaled_linear
    return _supports.floats(problem) or quantised.supports(problem)


VARIANTS = Variants(
    describe,
    Variant("packed_sm90", can=lambda call: call.packed_hopper, suits=lambda call: call.packed_suits),
    Variant("ring", can=lambda call: call.ring, suits=lambda call: call.few),
    Variant("packed", can=lambda call: call.packed, suits=lambda call: call.few),
    Variant("dequantised", can=lambda call: call.packed),
    Variant("one_row", can=lambda call: call.one_row and not (call.scaled or call.packed)),
    Variant("decode_sm90", can=lambda call: call.decode, suits=lambda call: call.decode_suits),
    Variant("scaled_sm90", can=lambda call: call.hopper),
    Variant("scaled", can=lambda call: call.scaled),
    Variant("torch"),
)


@kernel(ops.linear, name="triton", supports=supports, variants=VARIANTS)
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    weight_zero_point: torch.Tensor | None = None,
    variant: str | None = None,
) -> torch.Tensor:
    check_arguments(x, weight, bias, weight_scale, x_scale, out_dtype, weight_zero_point)
    if weight_zero_point is not None:
        weight_scale, weight_zero_point = _packed_linear.in_one_layout(weight_scale, weight_zero_point)
    picked = VARIANTS.of(variant, x, weight, bias, weight_scale, x_scale, out_dtype)
    if picked == "ring":
        return _packed_linear_sm80.ring_linear(x, weight, bias, weight_scale, weight_zero_point)
    if picked == "packed":
        return _packed_linear.packed_linear(x, weight, bias, weight_scale, weight_zero_point)
    if picked == "packed_sm90":
        return _packed_gemm_sm90.packed_gemm(x, weight, bias, weight_scale, weight_zero_point)
    if picked == "dequantised":
        return _packed_linear.dequantised_linear(x, weight, bias, weight_scale, weight_zero_point)
    if picked == "decode_sm90":
        return _decode_sm90.decode_linear(Operands(x, weight, weight_scale, x_scale, out_dtype), bias)
    if picked == "scaled_sm90":
        return _scaled_calls_sm90.scaled_linear(Operands(x, weight, weight_scale, x_scale, out_dtype), bias)
    if picked == "scaled":
        return _scaled_linear.scaled_linear(x, weight, bias, weight_scale, x_scale, out_dtype)
    if picked == "torch":
        return ops.linear(x, weight, bias, weight_scale, x_scale, out_dtype, weight_zero_point)
    num_outputs, columns = weight.shape
    out = x.new_empty((*x.shape[:-1], num_outputs))
    launch = _launch.launch_options(x.device) | _parts(columns, **_launch.parameters("linear", x.device, columns))
    _launch.launch(
        _linear, (_launch.cdiv(num_outputs, launch["OUTPUTS"]),),
        x, x.stride(-1), weight, weight.stride(0), bias, out, num_outputs, COLUMNS=columns, **launch,
    )  # fmt: skip
    return out


def _parts(columns: int, tile: int, width: int, warps: int) -> dict[str, int]:
    """Launch arguments of a program that holds `tile` elements of the weight at a time, up to `width` of each row."""
    block = min(width, _launch.next_power_of_2(columns))
    return {"OUTPUTS": tile // block, "BLOCK": block, "num_warps": warps}


@triton.jit(do_not_specialize=["num_outputs"])
def _linear(
    x, x_stride, weight, weight_stride, bias, out, num_outputs,
    COLUMNS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, BLOCK)
    is_output = output < num_outputs
    # Past the last row, a program reads that row again. With a mask instead, it adds products before its last loads if
    # Triton 3.8 compiles it. It then waits for memory twice, and takes up to 1.25 times as long.
    row = tl.minimum(output, num_outputs - 1)
    weight += row.to(tl.int64)[:, None] * weight_stride + column[None, :]
    products = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    for first in tl.range(0, COLUMNS, BLOCK):
        inside = first + column < COLUMNS
        # The weight is read only once, so it must not displace other data in the last-level cache. All programs read
        # the row x, so it stays there.
        w = tl.load(weight + first, inside[None, :], 0.0, eviction_policy="evict_first")
        v = tl.load(x + (first + column) * x_stride, inside, 0.0, eviction_policy="evict_last")
        products += w.to(tl.float32) * v.to(tl.float32)[None, :]
    y = tl.sum(products, 1)
    if bias is not None:
        y += tl.load(bias + output, is_output, 0.0).to(tl.float32)
    tl.store(out + output, y, is_output)
