"""The kernel of `vllm.v1.worker.gpu.sample.trace_replay`."""

import numpy as np
import torch

from vllm_opset.platform.cpu.runner_kernels._registry import implements


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
    requests = idx_mapping.numpy()
    steps = total_len.numpy()[requests] - prompt_len.numpy()[requests]
    replayed = np.flatnonzero((requests >= 0) & (steps >= 0) & (steps < trace_len.numpy()[requests]))
    sampled.numpy()[replayed] = trace_token_ids.numpy()[requests[replayed], steps[replayed]]
