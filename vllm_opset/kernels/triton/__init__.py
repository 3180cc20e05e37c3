"""Triton kernels for NVIDIA GPUs. For tests, they also run on a CPU in Triton's interpreter (TRITON_INTERPRET=1).

A file or folder whose name begins with no underscore implements the op of that name. The others are shared code. Files
whose names end in `_sm90` are kernels in Gluon for Hopper GPUs. Launch parameters are plain data in launch.yaml; see
`_launch`.
"""

import importlib
import importlib.util
import os

from vllm_opset.targets import Target

# Triton decides at import whether it interprets or compiles. In the interpreter the kernels run on a CPU, but selection
# never chooses them there, because only the device "cuda" prefers them.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = ("cpu",) if INTERPRETED else ("cuda",)


def unavailable() -> str | None:
    """Why Triton cannot be imported here, or None."""
    return None if importlib.util.find_spec("triton") else "Triton is not installed: pip install triton"


def launched_for(target: Target) -> Target:
    """The target that kernels are launched for. On a CPU, the interpreter runs them as a Hopper GPU would."""
    return Target("nvidia", "sm90") if target.vendor == "cpu" else target


if INTERPRETED and unavailable() is None:
    importlib.import_module(f"{__name__}._interpreter").patch()
