"""silu_and_mul in one pass."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.cpp._build import INT, POINTER, function
from vllm_opset.kernels.cpp._types import TYPES, supports_type
from vllm_opset.ops.activation._gated import check_width

run = function("silu_and_mul", INT, POINTER, POINTER, INT, INT, INT)


@kernel(ops.silu_and_mul, name="cpp", supports=supports_type)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    check_width(x)
    if x.ndim != 2 or x.stride(1) != 1:
        x = x.contiguous()
    *leading, width = x.shape
    size = width // 2
    y = torch.empty((*leading, size), dtype=x.dtype)
    run(
        TYPES[x.dtype], x.data_ptr(), y.data_ptr(),
        y.numel() // max(1, size), size, x.stride(0) if x.ndim == 2 else width,
    )  # fmt: skip
    return y
