"""rms_norm in one pass over each row, which stays in the first-level cache."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.cpp._build import FLOAT, INT, POINTER, function
from vllm_opset.kernels.cpp._types import TYPES, supports_type, type_and_address
from vllm_opset.ops.norm.rms_norm import RMSNormProblem, check_parameter

norm = function("rms_norm", INT, INT, *[POINTER] * 4, *[INT] * 5, FLOAT, FLOAT)


def supports(problem: RMSNormProblem) -> str | None:
    """fp32 and bf16, and weights of either."""
    if problem.weight_dtype not in (None, *TYPES):
        return f"not built for weights in {problem.weight_dtype}"
    return supports_type(problem)


@kernel(ops.rms_norm, name="cpp", supports=supports)
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, weight_offset: float = 0.0) -> torch.Tensor:
    check_parameter(weight, x)
    if x.ndim > 3 or x.stride(-1) != 1:
        x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype)
    size = x.shape[-1]
    if x.ndim == 3:
        outer, inner, (x_outer, x_inner, _) = x.shape[0], x.shape[1], x.stride()
    elif x.ndim == 2:
        outer, inner, (x_outer, x_inner) = x.shape[0], 1, x.stride()
    else:
        outer, inner, x_outer, x_inner = x.numel() // size, 1, size, 0
    norm(
        TYPES[x.dtype], *type_and_address(weight), x.data_ptr(), None, y.data_ptr(),
        outer, inner, size, x_outer, x_inner, epsilon, weight_offset,
    )  # fmt: skip
    return y
