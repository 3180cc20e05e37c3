"""linear for one row and a few, as in decode steps, and for quantised weights. PyTorch does the rest.

int4 weights have four variants, here with their numbers of tokens on Hopper GPUs:

- `ring`: 1 to 8, in groups of 128 columns and more. It serves other NVIDIA GPUs, too.
- `packed_sm90`: 9 to 256, and 1 to 8 where `ring` cannot.
- `packed`: up to 128 where neither can, such as on other GPUs.
- `dequantised` (`packed`): more.

fp8 weights have three variants. On Hopper GPUs, `decode_sm90` multiplies by up to 64 tokens, and by up to 512 for few
outputs. `scaled_sm90` (`_products.scaled_calls_sm90`) multiplies by more. `scaled` does all else, and serves int8
weights as well.

Other weights have three variants: `one_row`, `decode_sm90` for up to 64 tokens on Hopper GPUs, and `torch`, which calls
PyTorch (cuBLAS).

A variant has the name of its file, except where the name of the file is given here.
"""

from typing import NamedTuple

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _supports
from vllm_opset.kernels.triton._products import scaled_calls_sm90
from vllm_opset.kernels.triton._products.int4 import in_one_layout
from vllm_opset.kernels.triton._products.int4 import supports as supports_int4
from vllm_opset.kernels.triton._products.scaled import supports as supports_scaled
from vllm_opset.kernels.triton._products.scaled_calls_sm90 import Operands
from vllm_opset.kernels.triton._rows import num_rows
from vllm_opset.kernels.triton.linear import decode_sm90, one_row, packed_sm90, ring
from vllm_opset.kernels.triton.linear.packed import dequantised_linear, most_packed_tokens, packed_linear
from vllm_opset.kernels.triton.linear.scaled import scaled_linear
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
    hopper = scaled and scaled_calls_sm90.can(operands)
    decode = not packed and decode_sm90.can(operands)
    few = packed and rows <= most_packed_tokens(x.device)
    in_ring = packed and ring.fits(x, weight, weight_scale)
    decode_suits = decode and decode_sm90.suits(operands)
    packed_hopper = packed and packed_sm90.fits(x, weight, weight_scale)
    packed_suits = packed_hopper and packed_sm90.suits(x, in_ring)
    one_row = rows == 1 and weight.stride(1) == 1
    return Call(scaled, packed, hopper, decode, decode_suits, few, in_ring, packed_hopper, packed_suits, one_row)


def supports(problem: LinearProblem) -> str | None:
    """fp32, bf16 and fp16, accumulated in fp32; fp8, int8 and int4 weights, with scales for 32 columns or more."""
    stored = problem.scheme.weight
    supports_scheme = supports_int4 if stored is not None and stored.dtype is UINT4 else supports_scaled
    return _supports.floats(problem) or supports_scheme(problem)


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


# Functions by variant: for packed weights, and for other weights on a Hopper GPU.
PACKED_WEIGHTS = {
    "packed_sm90": packed_sm90.packed_gemm,
    "ring": ring.ring_linear,
    "packed": packed_linear,
    "dequantised": dequantised_linear,
}
UNPACKED_SM90 = {"decode_sm90": decode_sm90.decode_linear, "scaled_sm90": scaled_calls_sm90.scaled_linear}


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
        weight_scale, weight_zero_point = in_one_layout(weight_scale, weight_zero_point)
    picked = VARIANTS.of(variant, x, weight, bias, weight_scale, x_scale, out_dtype)
    if picked in PACKED_WEIGHTS:
        return PACKED_WEIGHTS[picked](x, weight, bias, weight_scale, weight_zero_point)
    if picked in UNPACKED_SM90:
        return UNPACKED_SM90[picked](Operands(x, weight, weight_scale, x_scale, out_dtype), bias)
    if picked == "scaled":
        return scaled_linear(x, weight, bias, weight_scale, x_scale, out_dtype)
    if picked == "torch":
        return ops.linear(x, weight, bias, weight_scale, x_scale, out_dtype, weight_zero_point)
    return one_row.one_row_linear(x, weight, bias)
