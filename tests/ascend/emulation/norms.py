"""The norms. They round like the reference results in the tests of CANN's open repository ops-nn (norm/rms_norm and
norm/add_rms_norm, tests/assets/golden.py); the documents give only the formulas.
"""

import torch
import torch.nn.functional as F

from emulation.registry import emulates, require


def normalised(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x in fp32 over its root mean square in the dimensions of gamma, and the reciprocal of that root mean square."""
    dims = tuple(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(x.square().mean(dim=dims, keepdim=True) + epsilon)
    return x * rstd, rstd


def check(x: torch.Tensor, gamma: torch.Tensor) -> None:
    require(gamma.dtype == x.dtype, f"gamma has input's dtype {x.dtype}, not {gamma.dtype}")
    require(x.shape[-gamma.dim() :] == gamma.shape, f"gamma {gamma.shape} is the end of input's shape {x.shape}")


@emulates("npu::npu_rms_norm")
def npu_rms_norm(input, gamma, epsilon=1e-6):
    check(input, gamma)
    y, rstd = normalised(input.float(), gamma, epsilon)
    return (y * gamma.float()).to(input.dtype), rstd


@emulates("npu::npu_add_rms_norm")
def npu_add_rms_norm(x1, x2, gamma, epsilon=1e-6):
    """Rounds the sum before it is normalised, and the norm before it is scaled, as on A2 and A3."""
    check(x1, gamma)
    require(x2.shape == x1.shape and x2.dtype == x1.dtype, "x1 and x2 have one shape and dtype")
    total = (x1.float() + x2.float()).to(x1.dtype)
    y, rstd = normalised(total.float(), gamma, epsilon)
    return (y.to(x1.dtype).float() * gamma.float()).to(x1.dtype), rstd, total


@emulates("npu::npu_layer_norm_eval")
def npu_layer_norm_eval(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    for parameter in (weight, bias):
        require(parameter is None or parameter.dtype == input.dtype, "weight and bias have input's dtype")
    weight, bias = (None if parameter is None else parameter.float() for parameter in (weight, bias))
    return F.layer_norm(input.float(), normalized_shape, weight, bias, eps).to(input.dtype)
