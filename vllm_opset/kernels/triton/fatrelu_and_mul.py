"""fatrelu_and_mul, by the launch that all activations share."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _activation, _supports


@kernel(ops.fatrelu_and_mul, name="triton", supports=_supports.floats)
def fatrelu_and_mul(x: torch.Tensor, threshold: float = 0.0) -> torch.Tensor:
    return _activation.gated("fatrelu_and_mul", x, threshold)
