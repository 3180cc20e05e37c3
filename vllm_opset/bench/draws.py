"""Samplers with a randomness of their own: their tokens are not the reference's, but must be some that it keeps."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import Kernel
from vllm_opset.ops.contract import Op, Sample
from vllm_opset.ops.sampling.top_k_top_p_sample import GREEDY_BELOW
from vllm_opset.parity import Check

DRAWN = (ops.top_k_top_p_sample.name,)
# Of the probability: sums of tens of thousands of fp32 numbers in another order move the cut of top-p by less.
SLACK = 1e-3


def check_draws(op: Op, kernel: Kernel, sample: Sample, dtype: torch.dtype) -> Check:
    """Whether each token is one that the sample's filters keep, or would with a top-p that is larger by SLACK.

    Raises NotImplementedError for a sample that nothing is drawn in.
    """
    args, kwargs = sample.make()
    if kwargs.get("temperature") is not None and bool((kwargs["temperature"] < GREEDY_BELOW).all()):
        raise NotImplementedError("greedy tokens are not drawn")
    tokens, _ = kernel.call(*args, **kwargs)
    wider = {"processed": "logits"}
    if kwargs.get("top_p") is not None:
        wider["top_p"] = (kwargs["top_p"] + SLACK).clamp(max=1.0)
    _, kept = op.reference(*args, **kwargs | wider)
    dropped = int(kept.gather(1, tokens.long()[:, None]).isneginf().sum())
    failure = f"{dropped} of {len(tokens)} tokens are not among those that the filters keep" if dropped else None
    return Check(op.name, kernel.name, dtype, sample.name, failure=failure)
