"""fused_add_rms_norm by the code of rms_norm, which adds the residual while it reads."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.cpp._types import TYPES, type_and_address
from vllm_opset.kernels.cpp.rms_norm import norm, supports
from vllm_opset.kernels.cpu import fused_add_rms_norm as in_torch
from vllm_opset.ops.norm.fused_add_rms_norm import check_arguments


@kernel(ops.fused_add_rms_norm, name="cpp", supports=supports)
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    weight_offset: float = 0.0,
) -> None:
    if not (x.is_contiguous() and residual.is_contiguous()):
        return in_torch.fused_add_rms_norm(x, residual, weight, epsilon, weight_offset)
    check_arguments(x, residual, weight)
    size, at = x.shape[-1], x.data_ptr()
    norm(
        TYPES[x.dtype], *type_and_address(weight), at, residual.data_ptr(), at,
        x.numel() // size, 1, size, size, 0, epsilon, weight_offset,
    )  # fmt: skip
