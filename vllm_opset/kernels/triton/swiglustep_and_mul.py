"""swiglustep_and_mul, by the launch that all activations share."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _activation, _supports


@kernel(ops.swiglustep_and_mul, name="triton", supports=_supports.floats)
def swiglustep_and_mul(x: torch.Tensor, limit: float = 7.0) -> torch.Tensor:
    return _activation.gated("swiglustep_and_mul", x, limit)
