"""Your own kernel in 20 lines. Check it, then serve with it:

export PYTHONPATH=examples OPSET_IMPORT=my_kernel
vllm-opset parity silu_and_mul --kernel mine
OPSET_KERNELS=silu_and_mul=mine python examples/offline.py
"""

import torch
import torch.nn.functional as F

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.ops.gated import GatedProblem


def supports(problem: GatedProblem) -> str | None:
    """Outputs of up to 65,536 columns."""
    return None if problem.size <= 65536 else f"{problem.size} columns are more than 65536"


@kernel(ops.silu_and_mul, name="mine", supports=supports)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)
