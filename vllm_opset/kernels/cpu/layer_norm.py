"""layer_norm by PyTorch's own fused operator, which computes the statistics in fp32."""

import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.ops.norm.rms_norm import check_parameter


@kernel(ops.layer_norm, name="cpu")
def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    check_parameter(weight, x)
    check_parameter(bias, x)
    return F.layer_norm(x, x.shape[-1:], weight, bias, epsilon)
