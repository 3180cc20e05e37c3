"""Activations: computed in fp32, rounded once."""

import torch
import torch.nn.functional as F

from emulation.registry import emulates


@emulates("npu::npu_swiglu")
def npu_swiglu(input, dim=-1):
    gate, up = input.float().chunk(2, dim=dim)
    return (F.silu(gate) * up).to(input.dtype)


@emulates("npu::npu_geglu")
def npu_geglu(input, dim=-1, approximate=1, activate_left=False):
    """Activates the right half unless told otherwise. approximate: 0 for erf, 1 for tanh."""
    left, right = input.float().chunk(2, dim=dim)
    activated, other = (left, right) if activate_left else (right, left)
    activated = F.gelu(activated, approximate="tanh" if approximate else "none")
    return (activated * other).to(input.dtype), activated.to(input.dtype)


@emulates("npu::npu_gelu")
def npu_gelu(input, *, approximate="none"):
    return F.gelu(input.float(), approximate=approximate).to(input.dtype)


@emulates("npu::npu_fast_gelu")
def npu_fast_gelu(input):
    """x · sigmoid(1.702 x), which is vLLM's quick_gelu, not its gelu_fast."""
    wide = input.float()
    return (wide * torch.sigmoid(1.702 * wide)).to(input.dtype)
