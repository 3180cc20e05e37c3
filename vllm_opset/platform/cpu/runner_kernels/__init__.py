"""Functions for a CPU, in NumPy, PyTorch and C++, replace the Triton kernels of vLLM's second model runner.

The files are named after vLLM's modules. The semantics are those of vLLM 0.31 to 0.33. A kernel whose parameters
changed is served in each form. vLLM launches these functions through its registry of replaced kernels.
"""

import functools
import importlib
import inspect
import pkgutil
import warnings

from vllm_opset.kernels import cpp
from vllm_opset.platform.bridges import find
from vllm_opset.platform.cpu.runner_kernels._launches import IMPLEMENTATIONS

for _module in pkgutil.iter_modules(__path__):
    if _module.name != "compiled" or cpp.unavailable() is None:
        importlib.import_module(f"{__name__}.{_module.name}")


@functools.cache
def register() -> None:
    """Have vLLM launch these implementations, once in a process.

    Raises Refusal for a kernel that this vLLM has in a form that is not known.
    """
    from vllm.triton_utils.dispatcher import register_kernels

    launchers = {}
    for implementation in sorted(IMPLEMENTATIONS, key=lambda one: one.compiled):
        launchers[implementation.kernel] = implementation.launcher(parameters(find(implementation.kernel)))
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # vLLM looks at all names of all modules
        register_kernels(launchers)


def parameters(kernel) -> tuple[str, ...]:
    """The names of a kernel's parameters. Without Triton, the kernel is a plain function."""
    return tuple(getattr(kernel, "arg_names", None) or inspect.signature(kernel).parameters)
