"""gelu_and_mul: the gated activation of Gemma and others (GeGLU).

Semantics: vLLM's `GeluAndMul.forward_native`, with the layer's `approximate`.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from vllm_opset.ops.activation import _gated
from vllm_opset.ops.contract import Sample, accumulator, op

APPROXIMATIONS = ("none", "tanh")


@op()
def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """y = gelu(x[..., :d]) * x[..., d:], in fp32 and rounded once.

    approximate: "none" for gelu(a) = a/2 · (1 + erf(a / √2)), "tanh" for a/2 · (1 + tanh(√(2/π) · (a + 0.044715 a³))).
    x: [..., 2 * d], any strides. Returns a new contiguous tensor [..., d] of x's dtype. Zero rows are allowed.
    Raises ValueError if the last dimension is odd or `approximate` is another word.
    """
    check_approximation(approximate)
    gate, up = _gated.halves(x.to(accumulator(x)))
    return (F.gelu(gate, approximate=approximate) * up).to(x.dtype).contiguous()


def check_approximation(approximate: str) -> None:
    """Raises ValueError if the word names no approximation."""
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"approximate must be one of {', '.join(APPROXIMATIONS)}, not {approximate!r}")


_gated.complete(
    gelu_and_mul, flops_per_element=10, variants=[{"approximate": approximate} for approximate in APPROXIMATIONS]
)
odd_widths = gelu_and_mul.illegal_samples


@gelu_and_mul.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    yield from odd_widths(device, dtype)
    x = torch.ones(4, 64, dtype=dtype, device=device)
    yield Sample("an unknown approximation", lambda: ((x,), {"approximate": "erf"}))
