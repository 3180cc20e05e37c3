"""Launches without Triton's check that the constants of a kernel's module have not changed since it was compiled.

Triton compares them at every launch: one by one, in Python. The sampler's kernels have up to 41 each.
"""

import sys

from triton.runtime.jit import JITFunction

OURS = __name__.partition(".")[0] + "."


def assume_unchanged() -> None:
    """Let later launches of the kernels that were compiled skip the check. Constants of opset's modules never change.

    Call it once all kernels are compiled: a kernel's key in Triton's cache also holds the constants of the functions
    that it calls.
    """
    # None stands for a module whose import is forbidden.
    modules = [module for name, module in sys.modules.items() if name.startswith(OURS) and module is not None]
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, JITFunction) and value.hash is not None:
                value.used_global_vals.clear()
