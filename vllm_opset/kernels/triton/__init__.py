"""Triton kernels: for NVIDIA GPUs, and on a CPU in Triton's interpreter (TRITON_INTERPRET=1), where they are proven."""

import importlib.util

DEVICES = ("cuda",)


def unavailable() -> str | None:
    """Why Triton cannot be imported here, or None."""
    return None if importlib.util.find_spec("triton") else "Triton is not installed: pip install triton"
