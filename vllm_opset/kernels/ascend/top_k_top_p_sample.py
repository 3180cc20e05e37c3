"""top_k_top_p_sample with filters by npu_top_k_top_p, and the reference for everything else.

Source: docs of npu_top_k_top_p. The operator sorts ascending and stably. top-k drops logits below the k-th largest, so
ties are kept. top-p drops tokens with a cumulative probability of at most 1 − p, except the last token. k is within
[1, 1024], and p has the logits' dtype. This kernel bridges three differences from the contract:

- Among equal logits, the operator drops the lowest indices first, but the contract drops the highest first. So top-p
  gets the vocabulary in reverse order.

- At p = 1 the operator drops tokens whose probability rounds to zero, but the contract keeps all. So the kernel does
  not filter such rows.

- If k exceeds 1024, PyTorch sorts. This includes k = vocabulary for a row without top-k. The kernel reads the largest k
  back from the device once a call, so it cannot be captured in a graph.

The random numbers also come from the reference: ten rounds of Philox in int64, in PyTorch.
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
    keys: torch.Tensor | None,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    processed: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if keys is None:
        return ops.top_k_top_p_sample.reference(logits, keys, processed=processed)
    x = logits.contiguous()
    if temperature is not None:
        greedy = temperature < GREEDY_BELOW
        x = x / temperature.masked_fill(greedy, 1.0).unsqueeze(1)
        temperature = torch.where(greedy, 0.0, 1.0)  # only greedy or not, because x is already divided
    if min_p is not None:
        x = keep_min_p(x, min_p)
    if top_k is not None and len(x):
        few = int(top_k.max()) <= _constraints.TOP_K_MAX
        x = npu.npu_top_k_top_p(x, None, top_k) if few else keep_top_k(x, top_k)
    if top_p is not None and len(x):
        kept = npu.npu_top_k_top_p(x.flip(-1), top_p, None).flip(-1)
        x = torch.where((top_p < 1).unsqueeze(1), kept, x)
    return ops.top_k_top_p_sample.reference(x, keys, temperature, processed=processed)
