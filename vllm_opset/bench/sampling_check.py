"""A check of samplers with their own random numbers: each token must be one of those that the reference keeps."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import Kernel
from vllm_opset.ops.contract import Op, Sample
from vllm_opset.ops.sampling.top_k_top_p_sample import GREEDY_BELOW
from vllm_opset.parity import Check

SAMPLING_OPS = (ops.top_k_top_p_sample.name,)
# A share of probability. Summing tens of thousands of fp32 numbers in another order moves top-p's cut by less than
# this.
SLACK = 1e-3


def check_sampled_tokens(op: Op, kernel: Kernel, sample: Sample, dtype: torch.dtype) -> Check:
    """Whether the sample's filters keep each token, or would keep it with a top-p that is larger by SLACK.

    Raises NotImplementedError for a sample in which no token is drawn.
    """
    args, kwargs = sample.make()
    _, keys = args
    temperature = kwargs.get("temperature")
    if keys is None or (temperature is not None and bool((temperature < GREEDY_BELOW).all())):
        raise NotImplementedError("greedy tokens are not drawn")
    tokens, _ = kernel.call(*args, **kwargs)
    wider = {"processed": "logits"}
    if kwargs.get("top_p") is not None:
        wider["top_p"] = (kwargs["top_p"] + SLACK).clamp(max=1.0)
    _, kept = op.reference(*args, **kwargs | wider)
    dropped = int(kept.gather(1, tokens.long()[:, None]).isneginf().sum())
    failure = f"{dropped} of {len(tokens)} tokens are not among those that the filters keep" if dropped else None
    return Check(op.name, kernel.name, dtype, sample.name, failure=failure)
