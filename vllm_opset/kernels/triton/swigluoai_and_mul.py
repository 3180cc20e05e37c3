"""swigluoai_and_mul, by the launch that all activations share."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _activation, _supports


@kernel(ops.swigluoai_and_mul, name="triton", supports=_supports.floats)
def swigluoai_and_mul(x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    return _activation.gated("silu_and_mul_with_clamp", x, limit, alpha, 1.0, interleaved=True)
