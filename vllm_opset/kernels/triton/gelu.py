"""gelu, by the launch that all activations share."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _activation, _supports


@kernel(ops.gelu, name="triton", supports=_supports.floats)
def gelu(x: torch.Tensor) -> torch.Tensor:
    return _activation.unary("gelu", x)
