"""linear with int8 weights and activations (W8A8) by npu_quant_matmul. PyTorch multiplies unquantised weights.

Source: its docs. The scale has one element, or one for each channel of the result. The scales of tokens are fp32 [m].
The result is bf16 or fp16. A bias has its dtype and is added after the scales (CANN aclnnQuantMatmulV4). The second
factor may be the transpose of a contiguous matrix, as in an example of the docs, so weights stay as vLLM loads them.
Nothing may be empty. This kernel uses neither NZ formats, which the docs recommend for speed, nor offsets.
"""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.ascend import _constraints
from vllm_opset.kernels.ascend._operators import npu
from vllm_opset.ops.gemm.linear import LinearProblem, check_arguments
from vllm_opset.ops.schemes import INT8, PER_ROW, PER_TENSOR


def supports(problem: LinearProblem) -> str | None:
    """bf16 and fp16 on A2 and A3, int8 per tensor or channel by int8 per tensor or token; up to 65,535 features."""
    scheme = problem.scheme
    if scheme.weight is None:
        return "PyTorch's own operator multiplies unquantised weights"
    for stored in (scheme.weight, scheme.activation):
        if stored is None or stored.dtype is not INT8 or stored.group not in (PER_TENSOR, PER_ROW):
            return f"npu_quant_matmul multiplies int8 by int8 with scales per tensor or row, not {scheme}"
    sizes = _constraints.quant_matmul(problem.in_features, problem.out_features)
    return sizes or _constraints.refused("npu_quant_matmul", problem)


@kernel(ops.linear, name="ascend", supports=supports)
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    weight_zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    check_arguments(x, weight, bias, weight_scale, x_scale, out_dtype, weight_zero_point)
    if not len(x):
        return x.new_empty((0, len(weight)), dtype=out_dtype)
    return npu.npu_quant_matmul(
        x.contiguous(),
        weight.contiguous().t(),
        weight_scale.flatten(),
        pertoken_scale=x_scale.expand(len(x), 1).flatten().contiguous(),
        bias=bias,
        output_dtype=out_dtype,
    )
