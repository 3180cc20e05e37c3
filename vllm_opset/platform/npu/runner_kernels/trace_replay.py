"""The kernel of `vllm.v1.worker.gpu.sample.trace_replay`."""

import torch

from vllm_opset.platform.npu.runner_kernels._registry import implements
from vllm_opset.platform.npu.runner_kernels._rows import overwrite


@implements("gpu.sample.trace_replay._trace_replay_kernel")
def trace_replay(
    sampled: torch.Tensor,
    idx_mapping: torch.Tensor,
    trace_token_ids: torch.Tensor,
    trace_len: torch.Tensor,
    total_len: torch.Tensor,
    prompt_len: torch.Tensor,
) -> None:
    """Replace sampled tokens by those that a request's trace has at this step of its answer, in place."""
    requests = idx_mapping.clamp(min=0)
    steps = (total_len - prompt_len)[requests]
    replayed = (idx_mapping >= 0) & (steps >= 0) & (steps < trace_len[requests])
    tokens = trace_token_ids[requests, steps.clamp(0, trace_token_ids.shape[1] - 1)]
    overwrite(sampled, replayed, tokens)
