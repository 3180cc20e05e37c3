"""Kernels of `vllm.v1.worker.gpu.sample.logprob`."""

import torch

from vllm_opset.platform.runner_kernels._registry import implements


@implements("gpu.sample.logprob._topk_log_softmax_kernel", ignores="topk vocab_size")
def topk_log_softmax(output: torch.Tensor, logits: torch.Tensor, topk_ids: torch.Tensor) -> None:
    """The log-probabilities of these tokens, fp32 [rows, num_tokens]."""
    scores = logits.float()
    torch.sub(scores.gather(1, topk_ids), scores.logsumexp(1, keepdim=True), out=output)


@implements("gpu.sample.logprob._ranks_kernel", ignores="vocab_size")
def ranks(output: torch.Tensor, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
    """The rank of a token in each row: how many logits are not less than its own."""
    output.copy_((logits >= logits.gather(1, token_ids[:, None])).sum(1))
