"""Kernels for Ascend NPUs, on the public operators of torch_npu.

Not run on Ascend hardware; not compiled or executed by CANN. They encode the public documentation of the operators:
`_constraints` holds its limits, each with its source. Every file names its operator and the undocumented points.
torch_npu registers its operators. `unavailable` imports it if nothing is missing. Importing this package alone never
imports it.
"""

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

DEVICES = ("npu",)
# These files can be imported without torch_npu, so that `vllm-opset ops` can list what they support on any machine.
LISTED_ANYWHERE = True
# One library of each part of CANN that torch_npu needs, from those that it is linked against.
CANN_LIBRARIES = ("libascendcl.so", "libhccl.so", "libge_runner.so")


def unavailable() -> str | None:
    """The reason why torch_npu is not available here, or None. Imports torch_npu if nothing is missing."""
    return None if "torch_npu" in sys.modules else missing() or import_error()


def missing() -> str | None:
    """What torch_npu lacks here, or None. This does not import torch_npu."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed; where there is an NPU, pip install the torch-npu of this torch's release"
    lacking = missing_libraries()
    if lacking:
        return (
            f"torch_npu is installed, and CANN's {', '.join(lacking)} cannot be loaded ({cann()}): install CANN, then "
            "`source /usr/local/Ascend/ascend-toolkit/set_env.sh` (or the set_env.sh of where it was installed)"
        )
    releases = {name: importlib.metadata.version(name) for name in ("torch", "torch_npu")}
    if len({tuple(release.split(".")[:2]) for release in releases.values()}) > 1:
        return (
            f"torch_npu {releases['torch_npu']} does not fit torch {releases['torch']}: pip install the one that does"
        )
    return None


@functools.cache
def import_error() -> str | None:
    """The error that torch_npu or CANN raises when torch_npu is imported, or None."""
    try:
        importlib.import_module("torch_npu")
    except Exception as error:
        return f"torch_npu cannot be imported ({error}): install a CANN that its release notes name beside this release"
    return None


def missing_libraries() -> list[str]:
    """The CANN libraries that torch_npu needs and this process cannot load."""
    return [library for library in CANN_LIBRARIES if not _loads(library)]


def cann() -> str:
    """The location of CANN, from the variable that its set_env.sh sets."""
    home = os.environ.get("ASCEND_HOME_PATH")
    if home is None:
        return "ASCEND_HOME_PATH is not set"
    return f"ASCEND_HOME_PATH={home}" + ("" if Path(home).is_dir() else ", which is no folder")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
