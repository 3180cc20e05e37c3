"""C++ kernels for a CPU, of the ops that a decode step calls by the hundred on little data.

There PyTorch's own operators cost some microseconds each, whatever they do, and a kernel of several of them as many
times that; a call from here costs one or two. The kernels are built for this machine's processor by its own compiler
when they are first wanted (in two seconds) and kept: see `_build`. A machine without one has those of `kernels/cpu`,
which are also what these hand over to where there is nothing to gain: long prefills, and tensors whose rows do not lie
in one piece. They compute with as many threads as PyTorch does in the thread that calls them, if it has ever said how
many that is (`torch.set_num_threads`).
"""

from vllm_opset.kernels.cpp import _build

DEVICES = ("cpu",)


def unavailable() -> str | None:
    """Why there is no library, or None."""
    return _build.library().reason
