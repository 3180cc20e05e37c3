"""gelu_tanh, by the launch that all activations share."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _activation, _supports


@kernel(ops.gelu_tanh, name="triton", supports=_supports.floats)
def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return _activation.unary("gelu_tanh", x)
