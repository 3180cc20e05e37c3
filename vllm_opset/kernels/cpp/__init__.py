"""C++ kernels for a CPU, for the ops that a decode step calls hundreds of times on little data.

A PyTorch operator costs some microseconds for each call, however small, and a kernel of several operators pays this
several times. A call of a C++ kernel costs one or two microseconds.

The compiler of this machine builds the kernels for its processor at their first use, in two seconds, and they are kept:
see `_build`. A machine without a compiler uses `kernels/cpu`. The C++ kernels also call those if there is nothing to
gain: for long prefills, and for tensors whose rows are not contiguous.

The kernels use as many threads as PyTorch does in the calling thread, if `torch.set_num_threads` was ever called there.
"""

from vllm_opset.kernels.cpp import _build

DEVICES = ("cpu",)


def unavailable() -> str | None:
    """The reason why there is no library, or None."""
    return _build.library().reason
