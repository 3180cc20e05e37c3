"""rms_norm_gated in fp32, with the gate in as few calls as PyTorch allows."""

import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.cpu.rms_norm import inverse_rms
from vllm_opset.ops.norm.rms_norm_gated import SILU, check_arguments


@kernel(ops.rms_norm_gated, name="cpu")
def rms_norm_gated(
    x: torch.Tensor,
    z: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: str = "swish",
) -> torch.Tensor:
    groups = check_arguments(x, z, weight, group_size, activation)
    gate = None if z is None else (F.silu(z.float()) if activation in SILU else z.float().sigmoid())
    wide = x.float() if gate is None or norm_before_gate else gate.mul_(x)
    grouped = wide.unflatten(-1, (groups, -1))
    y = (grouped * inverse_rms(grouped, epsilon)).flatten(-2).mul_(weight)
    if gate is not None and norm_before_gate:
        y.mul_(gate)
    return y.to(x.dtype).contiguous()
