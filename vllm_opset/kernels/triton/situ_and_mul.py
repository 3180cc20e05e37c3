"""situ_and_mul, by the launch that all activations share: a formula with and one without a limit of up."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _activation, _supports


@kernel(ops.situ_and_mul, name="triton", supports=_supports.floats)
def situ_and_mul(x: torch.Tensor, beta: float = 1.0, linear_beta: float | None = None) -> torch.Tensor:
    if linear_beta is None:
        return _activation.gated("situ_and_mul", x, beta)
    return _activation.gated("situ_and_mul_with_limit", x, beta, linear_beta)
