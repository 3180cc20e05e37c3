"""The kernel of `vllm.v1.worker.gpu.sample.output`."""

import numpy as np
import torch

from vllm_opset.platform.cpu.runner_kernels._registry import implements


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
    """
    for row in range(len(counts)):
        request, place = divmod(row, ROWS_PER_REQUEST)
        counts[row] = 0
        if place < int(num_sampled_tokens[request]):
            source = row if cu_num_logits is None else int(cu_num_logits[request]) + place
            kept = logits[source, :vocab_size].isfinite().numpy()
            tokens = np.flatnonzero(kept)
            counts[row] = len(tokens)
            token_ids.numpy()[row, : len(tokens)] = tokens[:max_num_kept]
            packed_mask.numpy()[row] = np.packbits(kept, bitorder="little")
