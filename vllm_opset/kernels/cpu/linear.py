"""linear with the weight as the left factor where tokens are few: yᵀ = weight xᵀ.

Decoding reads the whole weight for a handful of tokens. As the right factor, which is what `F.linear` makes of it, the
weight is first rearranged at every call, by oneDNN in bf16 and by MKL in fp32; as the left one it is read as it lies.
"""

import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.ops.contract import Problem
from vllm_opset.ops.linear import check_bias

# The numbers of tokens at which this was faster, by weights that come from memory: in fp32 MKL has ways of its own with
# fewer, and beyond, rearranging the weight pays.
FEW = {torch.bfloat16: range(2, 65), torch.float32: range(12, 49)}


def supports(problem: Problem) -> str | None:
    """fp32 and bf16."""
    return None if problem.dtype in FEW else f"nothing gained in {problem.dtype}"


@kernel(ops.linear, name="cpu", supports=supports)
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    check_bias(weight, bias)
    if x.ndim == 2:
        num_tokens = x.shape[0]
        if num_tokens in FEW[x.dtype]:
            y = torch.mm(weight, x.t()) if bias is None else torch.addmm(bias[:, None], weight, x.t())
            return y.t().contiguous()
        if num_tokens == 1 and x.dtype is torch.bfloat16:
            return (torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0]))[None]
    return F.linear(x, weight, bias).contiguous()
