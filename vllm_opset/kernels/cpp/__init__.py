"""C++ kernels for a CPU, for the ops of a decode step and for mixtures of experts.

A PyTorch operator costs some microseconds for each call, however small, and a kernel of several operators pays this
several times. A call of a C++ kernel costs one or two microseconds. Products of few tokens read each weight once.

The compiler of this machine builds the kernels for its processor at their first use, and they are kept: see `_build`.
A machine without a compiler uses `kernels/cpu`. The C++ kernels also call those if there is nothing to gain: for long
prefills, and for tensors whose rows are not contiguous.

`runner_steps.cpp` is no kernel of an op. It is for `platform/cpu/runner_kernels`, and is built with the others.

The kernels have threads of their own (`team.cpp`): as many as PyTorch has in the calling thread, if
`torch.set_num_threads` was ever called there, and fewer while another process needs a core.
"""

from vllm_opset.kernels.cpp import _build

DEVICES = ("cpu",)


def unavailable() -> str | None:
    """The reason why there is no library, or None."""
    return _build.library().reason
