"""top_k_top_p_sample with its filters by npu_top_k_top_p, and everything else as the reference has it.

Source: docs of npu_top_k_top_p: a stable ascending sort, from which top-k drops what is below the k-th largest (so ties
are kept) and top-p what has a cumulative probability of at most 1 − p, but for the last; k within [1, 1024], p of the
logits' dtype. What that leaves to the adapter:
- of several equal logits, the sort drops those with the lowest indices first, the contract those with the highest: so
  top-p is given the vocabulary backwards;
- at p = 1 it drops what rounds to probability zero, where the contract keeps all: such rows stay as they were;
- k beyond 1024, above all k = vocabulary for a row without top-k, goes to a sort in PyTorch. To know, the largest k is
  read back from the device, once a call: it is no kernel to capture.
The random numbers are the reference's too: ten rounds of Philox in int64, in PyTorch.
"""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.ascend import _constraints
from vllm_opset.kernels.ascend._operators import npu
from vllm_opset.ops.sampling.top_k_top_p_sample import GREEDY_BELOW, TopKTopPSampleProblem, keep_min_p, keep_top_k


def supports(problem: TopKTopPSampleProblem) -> str | None:
    """fp32 logits on A2 and A3."""
    if problem.dtype != torch.float32:
        return f"sampling is in fp32, not {_constraints.names([problem.dtype])}"
    return _constraints.refused("npu_top_k_top_p", problem)


@kernel(ops.top_k_top_p_sample, name="ascend", supports=supports)
def top_k_top_p_sample(
    logits: torch.Tensor,
    keys: torch.Tensor,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    processed: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = logits.contiguous()
    if temperature is not None:
        greedy = temperature < GREEDY_BELOW
        x = x / temperature.masked_fill(greedy, 1.0).unsqueeze(1)
        temperature = torch.where(greedy, 0.0, 1.0)  # what is left of it for the draw
    if min_p is not None:
        x = keep_min_p(x, min_p)
    if top_k is not None and len(x):
        few = int(top_k.max()) <= _constraints.TOP_K_MAX
        x = npu.npu_top_k_top_p(x, None, top_k) if few else keep_top_k(x, top_k)
    if top_p is not None and len(x):
        kept = npu.npu_top_k_top_p(x.flip(-1), top_p, None).flip(-1)
        x = torch.where((top_p < 1).unsqueeze(1), kept, x)
    return ops.top_k_top_p_sample.reference(x, keys, temperature, processed=processed)
