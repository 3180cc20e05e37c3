"""Functions for a CPU, in NumPy, PyTorch and C++, replace Triton kernels of vLLM's second model runner.

The files are named after vLLM's modules.
"""

import importlib
import pkgutil

from vllm_opset.kernels import cpp
from vllm_opset.platform.cpu.runner_kernels._registry import DRAFTS, REGISTRY

__all__ = ["DRAFTS", "REGISTRY"]

for _module in pkgutil.iter_modules(__path__):
    if _module.name != "compiled" or cpp.unavailable() is None:
        importlib.import_module(f"{__name__}.{_module.name}")
