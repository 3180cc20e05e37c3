"""rms_norm in as few calls as PyTorch allows, because at decode sizes the calls dominate the cost."""

import functools

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.ops.norm.rms_norm import check_parameter


@kernel(ops.rms_norm, name="cpu")
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, weight_offset: float = 0.0) -> torch.Tensor:
    check_parameter(weight, x)
    wide = x.float()
    y = wide * inverse_rms(wide, epsilon)
    if weight is not None:
        y.mul_(weight.float() + weight_offset if weight_offset else weight)
    return (y if wide is x else y.to(x.dtype)).contiguous()


def inverse_rms(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    """1 / sqrt(mean(x²) + epsilon) of each row of the fp32 tensor x, as [..., 1]."""
    norm = torch.linalg.vector_norm(x, 2, -1, True)
    return torch.addcmul(_scalar(epsilon), norm, norm, value=1 / x.shape[-1]).rsqrt_()


@functools.cache
def _scalar(value: float) -> torch.Tensor:
    """The value as a cached tensor, because making one costs as much as the operator that uses it.

    It is not an inference tensor, so that it also works outside inference mode.
    """
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32, device="cpu")
