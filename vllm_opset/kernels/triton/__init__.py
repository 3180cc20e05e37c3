"""Triton kernels: for NVIDIA GPUs, and on a CPU in Triton's interpreter (TRITON_INTERPRET=1), where they are proven.

Launch parameters are plain data in launch.yaml; see `_launch`.
"""

import importlib
import importlib.util
import os

# Triton decides at import which of the two it is. In the interpreter the kernels run on a CPU, but nothing selects them
# there: no device prefers them but "cuda".
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = ("cpu",) if INTERPRETED else ("cuda",)


def unavailable() -> str | None:
    """Why Triton cannot be imported here, or None."""
    return None if importlib.util.find_spec("triton") else "Triton is not installed: pip install triton"


if INTERPRETED and unavailable() is None:
    importlib.import_module(f"{__name__}._interpreter").patch()
