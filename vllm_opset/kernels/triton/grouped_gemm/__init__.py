"""grouped_gemm: each program multiplies a tile of one block's rows by a tile of the weight of the block's expert.

Programs read rows of x through `sorted_token_ids`, so no sorted copy is made. The grid covers as many blocks as the
shapes allow. Programs of empty blocks, which have the expert −1, multiply and write nothing.

- `decode`: blocks of up to 16 choices. Reading the weights takes the time, and each weight is read once.
- `prefill`: larger blocks, whose programs are ordered so that those of one expert run at the same time.

On Hopper GPUs, two variants multiply blocks of up to 16 choices: `wide_decode_sm90` by int4 weights in groups of 128
columns and more, and `decode_sm90` by MXFP4 weights, and by other int4 weights in groups of 32 columns or with long
rows (`least_columns` in launch.yaml). `prefill_sm90` multiplies larger blocks in fp8, and in 16 bits by int4 and MXFP4
weights.

`decode` and `prefill` are one kernel for each way of storing weights: `unquantised`, `scaled` (8 bits), `int4` and
`mxfp4`. `prefill_sm90` is `packed_sm90` or `mxfp4_sm90`, and in fp8 `_products.scaled_calls_sm90`.
"""

from typing import NamedTuple

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _launch, _supports
from vllm_opset.kernels.triton._products import scaled_calls_sm90
from vllm_opset.kernels.triton._products.int4 import in_one_layout, scale_columns
from vllm_opset.kernels.triton._products.scaled import supports as supports_scaled
from vllm_opset.kernels.triton._products.scaled_calls_sm90 import Operands
from vllm_opset.kernels.triton._products.tiles import Order, Product
from vllm_opset.kernels.triton.grouped_gemm import (
    decode_sm90,
    int4,
    mxfp4,
    mxfp4_sm90,
    packed_sm90,
    scaled,
    unquantised,
    wide_decode_sm90,
)
from vllm_opset.kernels.triton.grouped_gemm.packed_sm90 import Packed
from vllm_opset.ops.moe.fused_experts import FusedExpertsProblem
from vllm_opset.ops.moe.grouped_gemm import GroupedGemmProblem, check_arguments
from vllm_opset.ops.schemes import MXFP4, PACKED, UINT4, Scheme, is_mxfp4
from vllm_opset.variants import Variant, Variants

LEAST_ROWS, MOST_ROWS = 16, 128  # of a tile: what tensor cores take, and what registers hold
LEAST_ROWS_SM90 = 64  # of a block, of which a tile of `prefill_sm90` has all or half
LEAST_COLUMNS = 16  # that tensor cores multiply at a time


class Call(NamedTuple):
    """block_size: the choices of a block.

    hopper: whether `prefill_sm90` can multiply them. decode_sm90, wide_decode_sm90: whether these variants can.
    decode_suits: whether `decode_sm90` was measured as faster than `decode` with such weights.
    """

    block_size: int
    hopper: bool
    wide_decode_sm90: bool
    decode_sm90: bool
    decode_suits: bool


def supports(problem: GroupedGemmProblem) -> str | None:
    """fp32, bf16 and fp16, accumulated in fp32; fp8 e4m3, int8 and int4 weights, with scales for 32 columns or more;
    MXFP4 weights for bf16.
    """
    if is_packed(problem.scheme):
        return packed_supports(problem)
    return _supports.floats(problem) or supports_scaled(problem)


def is_packed(scheme: Scheme) -> bool:
    """Whether a byte of the weights holds two values."""
    return scheme.weight is not None and (scheme.weight == MXFP4 or scheme.weight.dtype is UINT4)


def packed_supports(problem: GroupedGemmProblem | FusedExpertsProblem) -> str | None:
    """What the products by packed weights support."""
    if problem.scheme.weight == MXFP4:
        return mxfp4.supports(problem, problem.scheme)
    return _supports.floats(problem) or int4.supports(problem, problem.scheme)


def describe(
    x, weight, sorted_token_ids, expert_ids, top_k, bias=None, weight_scale=None, x_scale=None, out_dtype=None,
    weight_zero_point=None,
) -> Call:  # fmt: skip
    block_size = len(sorted_token_ids) // max(len(expert_ids), 1)
    wide = wide_decode_sm90.can(x, weight, weight_scale, block_size)
    decode = decode_sm90.can(x, weight, weight_scale, block_size)
    if weight.dtype is PACKED:
        hopper = packed_sm90.can(x, weight, weight_scale)
    else:
        hopper = scaled_calls_sm90.can(Operands(x, weight, weight_scale, x_scale, out_dtype))
    hopper = hopper and block_size % LEAST_ROWS_SM90 == 0
    decode_suits = decode and _suits_decode_sm90(weight, weight_scale)
    return Call(block_size, hopper, wide, decode, decode_suits)


def _suits_decode_sm90(weight: torch.Tensor, weight_scale: torch.Tensor) -> bool:
    """Whether `decode_sm90` is faster than `decode`: for long rows, and where many scales slow that down."""
    if is_mxfp4(weight, weight_scale) or scale_columns(weight[0], weight_scale[0]) <= MXFP4.group.columns:
        return True
    values = _launch.parameters("columns_int4_grouped_gemm_decode_sm90", weight.device, 0)
    return 2 * weight.shape[-1] >= values["least_columns"]


VARIANTS = Variants(
    describe,
    Variant("wide_decode_sm90", can=lambda call: call.wide_decode_sm90),
    Variant("decode_sm90", can=lambda call: call.decode_sm90, suits=lambda call: call.decode_suits),
    Variant("decode", can=lambda call: call.block_size <= LEAST_ROWS),
    Variant("prefill_sm90", can=lambda call: call.hopper),
    Variant("prefill"),
)


@kernel(ops.grouped_gemm, name="triton", supports=supports, variants=VARIANTS)
def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    weight_zero_point: torch.Tensor | None = None,
    variant: str | None = None,
) -> torch.Tensor:
    check_arguments(
        x, weight, sorted_token_ids, expert_ids, top_k, bias, weight_scale, x_scale, out_dtype, weight_zero_point
    )
    out = x.new_zeros((len(x) * top_k, weight.shape[1]), dtype=out_dtype or x.dtype)
    order = Order(sorted_token_ids, expert_ids, top_k)
    write_products(out, x, weight, order, bias, weight_scale, x_scale, weight_zero_point, variant)
    return out


def write_products(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    order: Order,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    weight_zero_point: torch.Tensor | None,
    variant: str | None = None,
) -> None:
    """Writes the results of `grouped_gemm` to out, for arguments that were checked.

    The rows of choices that have no place stay as they are.
    """
    if not order.num_blocks:
        return
    if weight_zero_point is not None:
        weight_scale, weight_zero_point = in_one_layout(weight_scale, weight_zero_point)
    picked = VARIANTS.of(variant, x, weight, *order, bias, weight_scale, x_scale, out.dtype)
    if picked in ("decode", "prefill"):
        tile = _tile(picked, order.block_size, order.num_blocks, weight, weight_scale)
        product = Product(x, weight, bias, order, out, read_once=picked == "decode")
        _multiply_tiles(product, weight_scale, x_scale, weight_zero_point, tile)
    elif weight.dtype is PACKED:
        PACKED_SM90[picked](Packed(x, weight, weight_scale, weight_zero_point), bias, out, order)
    else:
        operands = Operands(x, weight, weight_scale, x_scale, out.dtype)
        scaled_calls_sm90.scaled_grouped_gemm(operands, bias, out, order)


def _multiply_tiles(
    product: Product,
    weight_scale: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    weight_zero_point: torch.Tensor | None,
    tile: dict[str, int],
) -> None:
    """Writes the product by `decode` or `prefill`, which differ in the tile alone. tile: launch arguments."""
    if is_mxfp4(product.weight, weight_scale):
        mxfp4.launch(product, weight_scale, tile)
    elif product.weight.dtype is PACKED:
        int4.launch(product, weight_scale, weight_zero_point, tile)
    elif weight_scale is not None:
        scaled.launch(product, weight_scale, x_scale, tile)
    else:
        unquantised.launch(product, tile)


def _prefill_packed_sm90(call: Packed, bias: torch.Tensor | None, out: torch.Tensor, order: Order) -> None:
    """Writes the product by packed weights to out. MXFP4 has two kernels: each serves tiles for which it is faster."""
    launch = f"{_launch_of(call.weight, call.weight_scale)}_prefill_sm90"
    values = _launch.parameters(launch, call.x.device, order.block_size)
    if is_mxfp4(call.weight, call.weight_scale) and values["rows"] <= mxfp4_sm90.MOST_ROWS:
        mxfp4_sm90.mxfp4_grouped_gemm(call.x, call.weight, bias, call.weight_scale, out, order, values)
    else:
        packed_sm90.packed_grouped_gemm(call, bias, out, order, values)


# Functions by variant, for packed weights on a Hopper GPU.
PACKED_SM90 = {
    "wide_decode_sm90": wide_decode_sm90.decode_experts,
    "decode_sm90": decode_sm90.decode_experts,
    "prefill_sm90": _prefill_packed_sm90,
}


def _tile(
    variant: str, block_size: int, num_blocks: int, weight: torch.Tensor, weight_scale: torch.Tensor | None
) -> dict[str, int]:
    """Launch arguments: the sizes of a tile, which are not larger than what there is to multiply."""
    size, (num_outputs, elements) = num_blocks if variant == "decode" else block_size, weight.shape[1:]
    values = _launch.parameters(f"{_launch_of(weight, weight_scale)}_{variant}", weight.device, size)
    in_byte = 2 if weight.dtype is PACKED else 1
    width = min(values["bytes"] // weight.element_size(), _launch.next_power_of_2(elements)) * in_byte
    return {
        "BLOCK_M": min(max(LEAST_ROWS, _launch.next_power_of_2(block_size)), MOST_ROWS),
        "BLOCK_N": max(LEAST_COLUMNS, min(values["outputs"], _launch.next_power_of_2(num_outputs))),
        "BLOCK_K": max(LEAST_COLUMNS, width),
        "GROUP": values["group"],
        "num_warps": values["warps"],
        "num_stages": values["stages"],
    }


def _launch_of(weight: torch.Tensor, weight_scale: torch.Tensor | None) -> str:
    """The name of the launches for weights that are stored so."""
    if is_mxfp4(weight, weight_scale):
        return "mxfp4_grouped_gemm"
    if weight.dtype is PACKED:
        return "int4_grouped_gemm"
    return "grouped_gemm" if weight.element_size() > 1 else "scaled_grouped_gemm"
