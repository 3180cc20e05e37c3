"""The memory of weights that are loaded again.

CUDA graphs that were captured before hold addresses. When vLLM loads weights again, it copies them into the parameters
and buffers of its layers, whose addresses stay. Layers here also hold tensors that vLLM does not know, such as a
converted weight. `refilled` copies into these.
"""

import torch


def refilled(old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    """`old` with the values of `new`. It is `new` itself if there is no old tensor, or if that cannot hold the values.

    A tensor that oneDNN packed is replaced, because PyTorch cannot write to it. It is on a CPU, which has no graphs.
    """
    if old is None or old.is_mkldnn or (old.shape, old.dtype) != (new.shape, new.dtype):
        return new
    with torch.inference_mode():  # the old tensor may have been made in this mode, and is then changed in it alone
        return old.copy_(new)
