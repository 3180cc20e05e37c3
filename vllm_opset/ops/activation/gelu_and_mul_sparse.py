"""gelu_and_mul_sparse: GeGLU that keeps only the gates far above their row's mean, as in Gemma 3n.

Semantics: vLLM's `GeluAndMulSparse.forward_native`, with the layer's `std_multiplier` and `approximate`. vLLM computes
the mean and the standard deviation in x's dtype. This op computes them in fp32.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vllm_opset.ops.activation import _gated
from vllm_opset.ops.activation.gelu_and_mul import check_approximation
from vllm_opset.ops.contract import Problem, Sample, accumulator, op

MOST_GATES_OFF = 1.6448536269514722  # of 95 % of normally distributed gates, as in Gemma 3n


@dataclass(frozen=True)
class GatedRowProblem(Problem):
    """hidden_size: d, the number of gates in a row; None if it is not known."""

    hidden_size: int | None = None


@op(problem=GatedRowProblem)
def gelu_and_mul_sparse(x: torch.Tensor, std_multiplier: float, approximate: str = "none") -> torch.Tensor:
    """y = gelu(max(gate − (mean + std_multiplier · std), 0)) * up, in fp32 and rounded once.

    gate and up are x[..., :d] and x[..., d:]. mean and std are those of a row's gates; std divides by d. approximate:
    as in gelu_and_mul. x: [..., 2 * d], any strides. Returns a new contiguous tensor [..., d] of x's dtype. Zero rows
    are allowed. Raises ValueError if the last dimension is odd or `approximate` is another word.
    """
    check_approximation(approximate)
    gate, up = _gated.halves(x.to(accumulator(x)))
    mean = gate.mean(dim=-1, keepdim=True)
    std = (gate - mean).square().mean(dim=-1, keepdim=True).sqrt()
    return (F.gelu(F.relu(gate - (mean + std_multiplier * std)), approximate=approximate) * up).to(x.dtype).contiguous()


# An error of the cut-off is multiplied by up, so it grows with the square of the inputs.
_gated.complete(
    gelu_and_mul_sparse,
    flops_per_element=16,
    variants=[
        {"std_multiplier": MOST_GATES_OFF},
        {"std_multiplier": -0.5, "approximate": "tanh"},
    ],
    degree=2,
)
odd_widths = gelu_and_mul_sparse.illegal_samples


@gelu_and_mul_sparse.problem_of
def _(x, *_, **__) -> GatedRowProblem:
    return GatedRowProblem(x.device.type, x.dtype, x.shape[-1] // 2)


@gelu_and_mul_sparse.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    yield from odd_widths(device, dtype)
    x = torch.ones(4, 64, dtype=dtype, device=device)
    yield Sample("an unknown approximation", lambda: ((x, 1.0), {"approximate": "erf"}))
