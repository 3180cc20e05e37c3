"""torch_npu's operators. They are called as torch.ops registers them, with the names and order of their schemas.

Whoever loads a kernel file to run it has asked the package's `unavailable` before, which imports torch_npu.
"""

import torch

npu, atb = torch.ops.npu, torch.ops.atb
