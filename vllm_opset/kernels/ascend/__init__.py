"""Kernels for Ascend NPUs, on the public operators of torch_npu.

Not run on Ascend hardware; not compiled or executed by CANN. They encode the public documentation of the operators:
`_constraints` holds its limits, each with its source, and every file names its operator and what is not documented.
torch_npu registers its operators, and is imported when the first kernel file is, if it can be; never by this package
alone.
"""

import ctypes
import importlib.util
import sys

DEVICES = ("npu",)
# The files can be imported where torch_npu cannot, so that `vllm-opset ops` says there what they support.
LISTED_ANYWHERE = True
# Of those that torch_npu is linked against, one of each part of CANN that it wants.
CANN_LIBRARIES = ("libascendcl.so", "libhccl.so", "libge_runner.so")


def unavailable() -> str | None:
    """Why torch_npu cannot be had here, or None. It is not imported to find out: without CANN that raises."""
    if "torch_npu" in sys.modules:
        return None
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed; where there is an NPU, pip install the torch-npu of this torch's release"
    missing = [library for library in CANN_LIBRARIES if not _loads(library)]
    if missing:
        return (
            f"torch_npu is installed, and CANN's {', '.join(missing)} cannot be loaded: install CANN, then "
            "`source /usr/local/Ascend/ascend-toolkit/set_env.sh` (or the set_env.sh of where it was installed)"
        )
    return None


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
