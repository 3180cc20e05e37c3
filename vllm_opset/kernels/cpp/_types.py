"""The element types that the library computes in (_types.h), and what its kernels share because of them."""

import torch

from vllm_opset.ops.contract import Problem

# The numbers of the types for `with_type` in _types.h.
TYPES = {torch.float32: 0, torch.bfloat16: 1}
LANES = 16  # elements of a vector, as in _vector.h


def supports_type(problem: Problem) -> str | None:
    """fp32 and bf16."""
    return None if problem.dtype in TYPES else f"not built for {problem.dtype}"


def type_and_address(weight: torch.Tensor | None) -> tuple[int, int | None]:
    """The arguments of the library for a weight that may be missing: the number of its type, and its address."""
    return (0, None) if weight is None else (TYPES[weight.dtype], weight.data_ptr())
