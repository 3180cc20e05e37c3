"""Functions that replace Triton kernels of vLLM's second model runner: those in PyTorch that serve on every device.

The files are named after vLLM's modules. The semantics are those of vLLM 0.31 to 0.33. A kernel whose parameters
changed is served in each form. `cpu/runner_kernels` and `npu/runner_kernels` have the rest for their devices.
"""

import importlib
import pkgutil

from vllm_opset.platform.runner_kernels._registry import COMMON, Implementation, Registry, parameters

__all__ = ["COMMON", "Implementation", "Registry", "parameters"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
