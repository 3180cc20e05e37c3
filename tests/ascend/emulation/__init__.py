"""Some of torch_npu's operators in plain PyTorch, for tensors of the CPU, written from their documentation.

An emulation of what the documents say, not of a device: see ../README.md. Importing it makes `torch.ops.npu` and
`torch.ops.atb` work on the CPU, for the operators that the Ascend kernels use.
"""

from emulation import attention, cache, elementwise, graphs, norms, rotary, sampling
from emulation.registry import OPERATORS, Limits, UndocumentedCall, mode

__all__ = [
    "OPERATORS",
    "Limits",
    "UndocumentedCall",
    "attention",
    "cache",
    "elementwise",
    "graphs",
    "mode",
    "norms",
    "rotary",
    "sampling",
]
