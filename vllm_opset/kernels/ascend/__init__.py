"""Kernels for Ascend NPUs, on the public operators of torch_npu.

Not run on Ascend hardware; not compiled or executed by CANN. They encode the public documentation of the operators:
`_constraints` holds its limits, each with its source, and every file names its operator and what is not documented.
torch_npu registers its operators. It is imported when somebody asks whether it can be had and nothing is missing, never
by importing this package alone.
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
# The files can be imported where torch_npu cannot, so that `vllm-opset ops` says there what they support.
LISTED_ANYWHERE = True
# Of those that torch_npu is linked against, one of each part of CANN that it wants.
CANN_LIBRARIES = ("libascendcl.so", "libhccl.so", "libge_runner.so")


def unavailable() -> str | None:
    """Why torch_npu cannot be had here, or None. Imports it where nothing else speaks against it."""
    return None if "torch_npu" in sys.modules else missing() or import_error()


def missing() -> str | None:
    """What torch_npu lacks here, or None. It is not imported to find out."""
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
    """What torch_npu raises when it is imported, for reasons of its own or of CANN's, or None."""
    try:
        importlib.import_module("torch_npu")
    except Exception as error:
        return f"torch_npu cannot be imported ({error}): install a CANN that its release notes name beside this release"
    return None


def missing_libraries() -> list[str]:
    """Those of CANN that torch_npu needs and this process cannot load."""
    return [library for library in CANN_LIBRARIES if not _loads(library)]


def cann() -> str:
    """Where CANN is, by the variable that its set_env.sh sets."""
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
