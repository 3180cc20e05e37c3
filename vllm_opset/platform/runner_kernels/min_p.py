"""The kernel of `vllm.v1.worker.gpu.sample.min_p`."""

import torch

from vllm_opset.platform.runner_kernels._registry import implements


@implements("gpu.sample.min_p._min_p_kernel", ignores="vocab_size")
def min_p(logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, min_p: torch.Tensor) -> None:
    """Set the logits of tokens less probable than min_p times the most probable one to -inf, in place."""
    threshold = logits.amax(1).float() + min_p[expanded_idx_mapping].log()
    logits.masked_fill_(logits < threshold[:, None], -torch.inf)
