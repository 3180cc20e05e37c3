"""Lets the commands run where torch_npu is installed and CANN is not: there `import torch` loads it, and fails.

To be imported before torch. That it would have failed is for `doctor` to say. Where nothing is missing and torch_npu
fails all the same, PyTorch's own error says why, and names the variable.
"""

import importlib.util
import os

from vllm_opset.kernels import ascend

VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
IMPORT_FAILS = (
    os.environ.get(VARIABLE) != "0"
    and importlib.util.find_spec("torch_npu") is not None
    and ascend.missing() is not None
)
if IMPORT_FAILS:
    os.environ[VARIABLE] = "0"
