"""The kernel of `vllm.v1.worker.gpu.mm.rope`: the positions of tokens in models whose positions have components."""

import numpy as np
import torch

from vllm_opset.platform.cpu.runner_kernels._memory import differences, ragged
from vllm_opset.platform.cpu.runner_kernels._registry import implements


@implements("gpu.mm.rope._prepare_rope_positions_kernel", ignores="prefill_positions_stride0 prefill_positions_stride1")
def prepare_rope_positions(
    positions: torch.Tensor,
    prefill_positions: torch.Tensor,
    prefill_delta: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    prefill_lens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    NUM_DIMS: int,
) -> None:
    """The components of each token's position: known ones in a prompt, and then the token's place plus a difference.

    positions: [NUM_DIMS, at least num_tokens]. prefill_positions: [max_num_reqs * NUM_DIMS, max_model_len].
    prefill_delta: [max_num_reqs], the difference of each request.
    """
    known = prefill_positions.numpy().reshape(-1, NUM_DIMS, prefill_positions.shape[1])
    requests = idx_mapping.numpy()
    computed = num_computed_tokens.numpy()[requests]
    rows, places = ragged(differences(query_start_loc[: len(requests) + 1]))
    places += computed[rows]
    in_prompt = (computed < prefill_lens.numpy()[requests])[rows]
    later = places + prefill_delta.numpy()[requests[rows]]
    positions.numpy()[:, : len(rows)] = np.where(in_prompt, known[requests[rows], :, places].T, later)
