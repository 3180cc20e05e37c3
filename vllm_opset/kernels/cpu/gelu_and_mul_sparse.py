"""gelu_and_mul_sparse with the gates in fp32, all of which are then changed in place."""

import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.ops.activation._gated import halves
from vllm_opset.ops.activation.gelu_and_mul import check_approximation


@kernel(ops.gelu_and_mul_sparse, name="cpu")
def gelu_and_mul_sparse(x: torch.Tensor, std_multiplier: float, approximate: str = "none") -> torch.Tensor:
    check_approximation(approximate)
    gate, up = halves(x)
    wide = gate.float()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    std = torch.linalg.vector_norm(centred, dim=-1, keepdim=True).div_(gate.shape[-1] ** 0.5)
    kept = centred.sub_(std, alpha=std_multiplier).relu_()
    return F.gelu(kept, approximate=approximate).mul_(up).to(x.dtype).contiguous()
