"""layer_norm by npu_layer_norm_eval.

Source: docs of npu_layer_norm_eval: the same as torch.nn.functional.layer_norm; weight and bias may be absent. The docs
do not mention dtypes, so with a weight or bias in fp32 the whole norm is computed in fp32. Not documented: how the
variance is computed, which matters for rows far from zero.
"""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.ascend import _constraints
from vllm_opset.kernels.ascend._operators import npu
from vllm_opset.kernels.ascend._rows import rows
from vllm_opset.ops.norm.layer_norm import LayerNormProblem
from vllm_opset.ops.norm.rms_norm import check_parameter


def supports(problem: LayerNormProblem) -> str | None:
    """fp32, bf16 and fp16 on A2, A3 and A5; fp32 and fp16 on 310P."""
    return _constraints.refused("npu_layer_norm_eval", problem)


@kernel(ops.layer_norm, name="ascend", supports=supports)
def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    check_parameter(weight, x)
    check_parameter(bias, x)
    if x.numel() == 0:
        return x.new_empty(x.shape)
    dtype = x.dtype
    for parameter in (weight, bias):
        dtype = dtype if parameter is None else torch.promote_types(dtype, parameter.dtype)
    affine = [None if parameter is None else parameter.to(dtype) for parameter in (weight, bias)]
    y = npu.npu_layer_norm_eval(rows(x, dtype), [x.shape[-1]], *affine, eps=epsilon)
    return y.view(x.shape).to(x.dtype)
