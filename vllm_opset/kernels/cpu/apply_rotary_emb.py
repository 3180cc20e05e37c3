"""apply_rotary_emb by the kernel of rotary_embedding, on a copy of x: each token is a row of the table."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.cpu.rotary_embedding import SIGNS, rotate
from vllm_opset.ops.rope.apply_rotary_emb import check_arguments
from vllm_opset.ops.rope.rotary_embedding import pairs


@kernel(ops.apply_rotary_emb, name="cpu")
def apply_rotary_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox_style: bool = True) -> torch.Tensor:
    check_arguments(x, cos, sin)
    head_size = x.shape[-1]
    y = x.clone(memory_format=torch.contiguous_format)
    copies = y.numel() // max(1, y.shape[-3:].numel())
    cos, sin = (angles.float()[:, None, None].repeat(copies, 1, 1, 1) for angles in (cos, sin))
    rotate(pairs(y.flatten(0, -3), head_size, head_size, is_neox_style), cos, sin * SIGNS)
    return y
