"""The kernel of `vllm.v1.worker.gpu.sample.output`."""

import torch

from vllm_opset.platform.npu.runner_kernels._registry import implements
from vllm_opset.platform.npu.runner_kernels._rows import overwrite


@implements("gpu.sample.output._compact_sampling_mask_kernel", ignores="logits_row_stride logits_col_stride")
def compact_sampling_mask(
    logits: torch.Tensor,
    num_sampled_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    packed_mask: torch.Tensor,
    counts: torch.Tensor,
    vocab_size: int,
    max_num_kept: int,
    cu_num_logits: torch.Tensor | None = None,
    ROWS_PER_REQUEST: int = 1,
) -> None:
    """The tokens that each draw could choose from: the first ids, how many there are, and all of them as bits.

    token_ids: int32 [rows, max_num_kept]. packed_mask: uint8 [rows, ceil(vocab_size / 8)], the lowest bit first.
    A row without a draw has no tokens.
    """
    places = torch.arange(ROWS_PER_REQUEST, device=logits.device)
    drawn = (places < num_sampled_tokens[:, None]).view(-1, 1)
    if cu_num_logits is not None:
        sources = cu_num_logits[: len(num_sampled_tokens), None] + places
        logits = logits[sources.view(-1).clamp_(max=len(logits) - 1)]
    kept = (logits[:, :vocab_size].isfinite() & drawn).int()

    seen = kept.cumsum(1, dtype=torch.int32)
    counts.copy_(seen[:, -1])
    # The first token at which n tokens have been seen is the n-th one.
    numbers = torch.arange(1, max_num_kept + 1, dtype=torch.int32, device=logits.device).repeat(len(kept), 1)
    overwrite(token_ids, numbers <= counts[:, None], torch.searchsorted(seen, numbers))

    bits = torch.nn.functional.pad(kept, (0, -vocab_size % 8)).view(len(kept), -1, 8)
    packed_mask.copy_((bits << torch.arange(8, dtype=torch.int32, device=logits.device)).sum(2))
