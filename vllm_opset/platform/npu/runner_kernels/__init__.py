"""Functions for an NPU, in PyTorch, replace Triton kernels of vLLM's second model runner.

The files are named after vLLM's modules. No function reads a value back from the device, because a step would wait for
it. Shapes follow from the arguments alone.
"""

import importlib
import pkgutil

from vllm_opset.platform.npu.runner_kernels._registry import REGISTRY

__all__ = ["REGISTRY"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
