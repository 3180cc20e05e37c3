"""Your own kernel in 20 lines. Check it, then serve with it:

export PYTHONPATH=$PWD/examples:$PYTHONPATH OPSET_IMPORT=my_kernel
vllm-opset parity silu_and_mul --kernel mine
OPSET_KERNELS=silu_and_mul=mine python examples/offline.py
"""

import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.ops.activation._gated import halves
from vllm_opset.ops.contract import Problem


def supports(problem: Problem) -> str | None:
    """All but fp16."""
    return "fp16 is not tested" if problem.dtype is torch.float16 else None


@kernel(ops.silu_and_mul, name="mine", supports=supports)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = halves(x.float())
    return (F.silu(gate) * up).to(x.dtype).contiguous()
