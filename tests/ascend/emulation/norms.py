"""The norms: computed in fp32 and rounded once, which is this project's reading; the documents give the formulas."""

import torch
import torch.nn.functional as F

from emulation.registry import emulates, require, require_contiguous, require_dtype

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def normalise(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x in fp32, normalised over the dimensions of gamma, and the reciprocal of the root mean square."""
    dims = tuple(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(x.square().mean(dim=dims, keepdim=True) + epsilon)
    return x * rstd * gamma.float(), rstd


def check(x: torch.Tensor, gamma: torch.Tensor) -> None:
    require_dtype(x, *FLOATS, what="input")
    require(gamma.dtype == x.dtype, f"gamma has input's dtype {x.dtype}, not {gamma.dtype}")
    require(x.shape[-gamma.dim() :] == gamma.shape, f"gamma {gamma.shape} is the end of input's shape {x.shape}")


@emulates("npu::npu_rms_norm")
def npu_rms_norm(input, gamma, epsilon=1e-6):
    check(input, gamma)
    y, rstd = normalise(input.float(), gamma, epsilon)
    return y.to(input.dtype), rstd


@emulates("npu::npu_gemma_rms_norm")
def npu_gemma_rms_norm(input, gamma, epsilon=1e-6):
    check(input, gamma)
    require(input.numel() > 0, "empty tensors are not supported")
    require_contiguous(input=input, gamma=gamma)
    y, rstd = normalise(input.float(), gamma.float() + 1, epsilon)
    return y.to(input.dtype), rstd


@emulates("npu::npu_add_rms_norm")
def npu_add_rms_norm(x1, x2, gamma, epsilon=1e-6):
    """Whether a device normalises the sum before or after it is rounded, the documents do not say; here, before."""
    check_addends(x1, x2, gamma)
    total = x1.float() + x2.float()
    y, rstd = normalise(total, gamma, epsilon)
    return y.to(x1.dtype), rstd, total.to(x1.dtype)


@emulates("npu::npu_add_rms_norm_v2")
def npu_add_rms_norm_v2(x1, x2, gamma, epsilon=1e-6):
    """In place: x1 becomes the norm, x2 the sum."""
    y, rstd, total = npu_add_rms_norm(x1, x2, gamma, epsilon)
    x1.copy_(y)
    x2.copy_(total)
    return rstd


def check_addends(x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor) -> None:
    check(x1, gamma)
    require(x2.shape == x1.shape and x2.dtype == x1.dtype, "x1 and x2 have one shape and dtype")


@emulates("npu::npu_layer_norm_eval")
def npu_layer_norm_eval(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    require_dtype(input, *FLOATS, what="input")
    for parameter in (weight, bias):
        require(parameter is None or parameter.dtype == input.dtype, "weight and bias have input's dtype")
    weight, bias = (None if parameter is None else parameter.float() for parameter in (weight, bias))
    return F.layer_norm(input.float(), normalized_shape, weight, bias, eps).to(input.dtype)
