"""silu_and_mul_with_clamp, by the launch that all activations share."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _activation, _supports


@kernel(ops.silu_and_mul_with_clamp, name="triton", supports=_supports.floats)
def silu_and_mul_with_clamp(x: torch.Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0) -> torch.Tensor:
    return _activation.gated("silu_and_mul_with_clamp", x, limit, alpha, beta)
