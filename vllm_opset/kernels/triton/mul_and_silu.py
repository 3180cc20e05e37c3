"""mul_and_silu, by the launch that all activations share."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _activation, _supports


@kernel(ops.mul_and_silu, name="triton", supports=_supports.floats)
def mul_and_silu(x: torch.Tensor) -> torch.Tensor:
    return _activation.gated("mul_and_silu", x)
