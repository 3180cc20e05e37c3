"""int4 weights: two values in a byte, which become numbers in registers, and the layout of their scales."""

import torch
import triton
import triton.language as tl

from vllm_opset.kernels.triton import INTERPRETED, _launch
from vllm_opset.ops.contract import Problem
from vllm_opset.ops.schemes import MIDDLE, UINT4_BLOCK, WHOLE, group_of, values_shape

HALF = tl.constexpr(UINT4_BLOCK // 2)  # the columns whose values share the halves of the same bytes
NO_ZERO_POINT = tl.constexpr(MIDDLE)


def supports(problem: Problem) -> str | None:
    """int4 weights with scales for 32 columns or more."""
    group = problem.scheme.weight.group
    if group.columns != WHOLE and group.columns < UINT4_BLOCK:
        return f"a tile has {UINT4_BLOCK} columns of one scale, and here {problem.scheme.weight} has fewer"
    return None


def in_one_layout(scale: torch.Tensor, zero_point: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points of the same strides, by which kernels read both: contiguous ones if theirs differ."""
    if scale.stride() == zero_point.stride():
        return scale, zero_point
    return scale.contiguous(), zero_point.contiguous()


def paired(x: torch.Tensor) -> bool:
    """Whether an instruction makes two values."""
    on_nvidia = not INTERPRETED and _launch.target(x.device).vendor == "nvidia"
    return on_nvidia and x.dtype is not torch.float32


def scale_columns(weight: torch.Tensor, scale: torch.Tensor) -> int:
    """The columns that share a scale."""
    columns = values_shape(weight)[1]
    group = group_of((len(weight), columns), scale.shape).columns
    return columns if group == WHOLE else group


# Makes four bytes two pairs of low values and two of high ones. A pair takes few instructions: (bits & 15) | the bits
# of MAGIC, and the sum with -(MAGIC + zero point), as a product with one, since bf16 has no sum before Hopper. All is
# exact. A compiler makes one value at a time instead, which takes twice as many.
PAIRS = """{{
.reg .b32 first, second, third, fourth, one;
mov.b32 one, {one};
prmt.b32 first, $4, 0, 0x4140;
prmt.b32 second, $4, 0, 0x4342;
shr.u32 third, first, 4;
shr.u32 fourth, second, 4;
lop3.b32 first, first, 0x000F000F, {magic}, 0xEA;
lop3.b32 second, second, 0x000F000F, {magic}, 0xEA;
lop3.b32 third, third, 0x000F000F, {magic}, 0xEA;
lop3.b32 fourth, fourth, 0x000F000F, {magic}, 0xEA;
fma.rn.{type} $0, first, one, $5;
fma.rn.{type} $1, second, one, $6;
fma.rn.{type} $2, third, one, $5;
fma.rn.{type} $3, fourth, one, $6;
}}"""
REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r")
PAIRS_BF16 = tl.constexpr(PAIRS.format(magic="0x43004300", one="0x3F803F80", type="bf16x2"))
PAIRS_FP16 = tl.constexpr(PAIRS.format(magic="0x64006400", one="0x3C003C00", type="f16x2"))
# MAGIC + q has the bits of MAGIC, or q: the last bit of its mantissa stands for one.
MAGIC_BF16, MAGIC_FP16, MAGIC_FP32 = tl.constexpr(128.0), tl.constexpr(1024.0), tl.constexpr(8388608.0)


@triton.jit
def _pairs(w, zero, dtype: tl.constexpr):
    """The low and the high values of bytes, less their zero points, in bf16 or fp16, on an NVIDIA GPU."""
    if dtype == tl.bfloat16:
        zero = tl.broadcast_to((-MAGIC_BF16 - zero).to(tl.bfloat16), w.shape)
        low, high = tl.inline_asm_elementwise(
            PAIRS_BF16, REGISTERS, [w, zero], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        zero = tl.broadcast_to((-MAGIC_FP16 - zero).to(tl.float16), w.shape)
        low, high = tl.inline_asm_elementwise(
            PAIRS_FP16, REGISTERS, [w, zero], (tl.float16, tl.float16), is_pure=True, pack=4
        )
    return low, high


@triton.jit
def _values(w, zero, dtype: tl.constexpr):
    """The low and the high values of bytes, less their zero points."""
    bits, zero = w.to(tl.uint32), MAGIC_FP32 + zero
    low = ((bits & 15) | 0x4B000000).to(tl.float32, bitcast=True) - zero
    high = ((bits >> 4) | 0x4B000000).to(tl.float32, bitcast=True) - zero
    return low.to(dtype), high.to(dtype)


@triton.jit
def dequantised_tile(w, zero, dtype: tl.constexpr, PAIRED: tl.constexpr):
    """The low and the high values of bytes, less their zero points. PAIRED: as `paired` says."""
    if PAIRED:
        low, high = _pairs(w, zero, dtype)
    else:
        low, high = _values(w, zero, dtype)
    return low, high
