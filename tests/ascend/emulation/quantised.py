"""Dynamic quantisation and the product of int8 matrices, from the formulas in their documents."""

import torch

from emulation.registry import documented as limits
from emulation.registry import dtype_of, emulates, refuse, require


def stored(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x in int8 with the scale of each row. A row of zeros divides zero by zero: it gets values that show a use."""
    scale = x.float().abs().amax(-1) / 127
    values = (x.float() / scale.unsqueeze(-1)).round()
    return values.nan_to_num(127).to(torch.int8), scale


@emulates("npu::npu_dynamic_quant")
def npu_dynamic_quant(
    input, *, smooth_scales=None, group_index=None, dst_type=None, quant_mode="pertoken", dst_type_max=0.0
):
    if not (smooth_scales is group_index is dst_type is None and quant_mode == "pertoken"):
        raise NotImplementedError("only int8 with a scale for each token is emulated")
    require(input.dim() > 1, "input has more than one dimension")
    return stored(input)


@emulates("npu::npu_quant_matmul")
def npu_quant_matmul(
    x1, x2, scale, *, offset=None, pertoken_scale=None, bias=None, output_dtype=None, x1_dtype=None, x2_dtype=None,
    pertoken_scale_dtype=None, scale_dtype=None, group_sizes=None, y_scale=None,
):  # fmt: skip
    """A bias of floating-point numbers is added after the scales, one of int32 before (CANN)."""
    if pertoken_scale is None or output_dtype is None or offset is not None:
        raise NotImplementedError("only scales of tokens are emulated, without an offset")
    require(x1.dtype == x2.dtype == torch.int8, "x1 and x2 are int8")
    require(x1.dim() == x2.dim() == 2 and x1.numel() > 0 and x2.numel() > 0, "matrices that are not empty")
    require(x1.is_contiguous() and is_matrix(x2), "x1 is contiguous, x2 is so too or the transpose of one that is")
    refuse(limits.quant_matmul(x1.shape[1], x2.shape[1]))
    out_dtype, out_features = dtype_of(output_dtype), x2.shape[1]
    require(scale.dtype == torch.float32 or scale.dtype == out_dtype == torch.bfloat16, "scale is fp32, or as bf16 out")
    require(scale.shape in ((1,), (out_features,)) and scale.is_contiguous(), "scale is [1] or [n]")
    require(pertoken_scale.dtype == torch.float32, "pertoken_scale is fp32")
    require(pertoken_scale.shape == x1.shape[:1] and pertoken_scale.is_contiguous(), "pertoken_scale is [m]")
    if bias is not None:
        require(
            bias.dtype in (out_dtype, torch.float32) and bias.shape == (out_features,), "bias is [n], as out or fp32"
        )
    out = exactly(x1, x2) * scale.float() * pertoken_scale.unsqueeze(1)
    return (out if bias is None else out + bias.float()).to(out_dtype)


def exactly(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product of two matrices of int8, which sums of int32 hold exactly, in fp32."""
    return (x.double() @ weight.double()).float()


def is_matrix(x: torch.Tensor) -> bool:
    """Whether the last two dimensions of a contiguous tensor are as they were, or exchanged."""
    return x.is_contiguous() or x.mT.is_contiguous()
