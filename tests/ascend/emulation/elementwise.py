"""Activations: in fp32, rounded once."""

import torch
import torch.nn.functional as F

from emulation.registry import emulates, require_dtype

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    return F.gelu(x.float(), approximate=approximate)


@emulates("npu::npu_swiglu")
def npu_swiglu(input, dim=-1):
    require_dtype(input, *FLOATS, what="input")
    gate, up = input.float().chunk(2, dim=dim)
    return (F.silu(gate) * up).to(input.dtype)


@emulates("npu::npu_clipped_swiglu")
def npu_clipped_swiglu(x, *, group_index=None, dim=-1, alpha=1.702, limit=7.0, bias=1.0, interleaved=True):
    if group_index is not None or dim not in (-1, x.dim() - 1):
        raise NotImplementedError("groups and other dimensions are not emulated")
    require_dtype(x, *FLOATS, what="x")
    wide = x.float()
    gate, up = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + bias)).to(x.dtype)


@emulates("npu::npu_geglu")
def npu_geglu(input, dim=-1, approximate=1, activate_left=False):
    """The half that is activated is the right one unless told otherwise. approximate: 0 for erf, 1 for tanh."""
    require_dtype(input, *FLOATS, what="input")
    left, right = input.chunk(2, dim=dim)
    activated, other = (left, right) if activate_left else (right, left)
    activated = gelu(activated, "tanh" if approximate else "none")
    return (activated * other.float()).to(input.dtype), activated.to(input.dtype)


@emulates("npu::npu_gelu")
def npu_gelu(input, *, approximate="none"):
    require_dtype(input, *FLOATS, what="input")
    return gelu(input, approximate).to(input.dtype)


@emulates("npu::npu_fast_gelu")
def npu_fast_gelu(input):
    """x · sigmoid(1.702 x), which is vLLM's quick_gelu, not its gelu_fast."""
    require_dtype(input, *FLOATS, what="input")
    wide = input.float()
    return (wide * torch.sigmoid(1.702 * wide)).to(input.dtype)


@emulates("npu::npu_silu")
def npu_silu(input):
    require_dtype(input, *FLOATS, what="input")
    return F.silu(input.float()).to(input.dtype)
