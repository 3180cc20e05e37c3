"""A guard for environments with torch_npu but without CANN, in which `import torch` loads torch_npu and fails.

Import this module before torch. It disables the loading, and `doctor` reports the cause. If CANN is present and
torch_npu fails anyway, nothing is disabled: PyTorch's own error gives the reason and names the variable.
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
