"""Some of torch_npu's operators in plain PyTorch, for CPU tensors, written from their documentation.

They emulate the documents, not a device: see ../README.md. Importing this package makes `torch.ops.npu` and
`torch.ops.atb` work on the CPU, for the operators that the Ascend kernels use.
"""

from emulation import attention, cache, elementwise, experts, graphs, norms, quantised, rotary, sampling
from emulation.registry import OPERATORS, Limits, UndocumentedCall, mode

__all__ = [
    "OPERATORS",
    "Limits",
    "UndocumentedCall",
    "attention",
    "cache",
    "elementwise",
    "experts",
    "graphs",
    "mode",
    "norms",
    "quantised",
    "rotary",
    "sampling",
]
