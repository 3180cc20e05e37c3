"""The kernel of `vllm.v1.worker.gpu.metrics.logits`."""

import torch

from vllm_opset.platform.runner_kernels._registry import implements


@implements("gpu.metrics.logits._num_nans_kernel", ignores="vocab_size")
def num_nans(logits: torch.Tensor, num_nans: torch.Tensor) -> None:
    """The number of NaNs in each row of the logits."""
    num_nans.copy_(logits.isnan().sum(1))
