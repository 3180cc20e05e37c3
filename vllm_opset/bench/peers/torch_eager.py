"""PyTorch as a user would write it: with PyTorch's own operator if there is one, in the dtype of the case."""

import torch.nn.functional as F

from vllm_opset.ops.schemes import dequantise


def unavailable(device: str) -> str | None:
    """None, because it is always available."""
    return None


def rms_norm(x, weight, epsilon, weight_offset=0.0):
    return F.rms_norm(x, x.shape[-1:], weight if weight_offset == 0 else weight + weight_offset, epsilon)


def fused_add_rms_norm(x, residual, weight, epsilon, weight_offset=0.0):
    residual += x
    x.copy_(rms_norm(residual, weight, epsilon, weight_offset))


def layer_norm(x, weight, bias, epsilon):
    return F.layer_norm(x, x.shape[-1:], weight, bias, epsilon)


def linear(x, weight, bias=None, weight_scale=None, x_scale=None, out_dtype=None, weight_zero_point=None):
    if weight_scale is not None:
        weight = dequantise(weight, weight_scale, out_dtype, weight_zero_point)
        x = dequantise(x, x_scale, out_dtype)
    return F.linear(x, weight, bias)


def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def mul_and_silu(x):
    up, gate = x.chunk(2, dim=-1)
    return up * F.silu(gate)


def gelu_and_mul(x, approximate="none"):
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def gelu_new(x):
    return F.gelu(x, approximate="tanh")


def relu2(x):
    return F.relu(x).square()
