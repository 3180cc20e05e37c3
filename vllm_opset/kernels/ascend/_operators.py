"""torch_npu's operators. They are called as torch.ops registers them, with the names and order of their schemas.

Callers ask the package's `unavailable`, which imports torch_npu, before they load a kernel file to run it.
"""

import torch

npu, atb = torch.ops.npu, torch.ops.atb
