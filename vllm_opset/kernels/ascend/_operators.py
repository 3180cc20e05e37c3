"""torch_npu's operators. They are called as torch.ops registers them, with the names and order of their schemas."""

import torch

from vllm_opset.kernels import ascend

if ascend.unavailable() is None:
    import torch_npu  # noqa: F401  registers them

npu, atb = torch.ops.npu, torch.ops.atb
