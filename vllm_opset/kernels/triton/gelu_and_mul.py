"""gelu_and_mul, by the launch that all activations share: a formula for each approximation."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _activation, _supports
from vllm_opset.ops.activation.gelu_and_mul import check_approximation

FORMULAS = {"none": "gelu_and_mul", "tanh": "gelu_tanh_and_mul"}


@kernel(ops.gelu_and_mul, name="triton", supports=_supports.floats)
def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    check_approximation(approximate)
    return _activation.gated(FORMULAS[approximate], x)
