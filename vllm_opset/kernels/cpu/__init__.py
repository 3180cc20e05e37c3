"""Kernels for a CPU, made of PyTorch's fused operators and NumPy. They are faster than the references."""

DEVICES = ("cpu",)


def unavailable() -> str | None:
    """Always None, because these kernels need only PyTorch and NumPy."""
    return None
