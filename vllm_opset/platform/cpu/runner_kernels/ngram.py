"""The kernels of `vllm.v1.worker.gpu.spec_decode.ngram.speculator`, which draft what followed the same tokens before.

A score names the place of a match: `n · (L + 1) + position + 1` for n tokens from there on, and 0 for none. L is
max_model_len. So the largest score is of the longest match, and of the last one among these.
"""

import numpy as np
import torch

from vllm_opset.platform.cpu.runner_kernels._registry import implements_for_drafts as implements


@implements("gpu.spec_decode.ngram.speculator._ngram_scan_kernel", ignores="MAX_N_PO2 BLOCK_L")
def ngram_scan(
    token_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    total_len: torch.Tensor,
    num_sampled: torch.Tensor,
    scratch: torch.Tensor,
    L: int,
    MIN_N: int,
    MAX_N: int,
) -> None:
    """The score of the best match of a request's last tokens among those before, for requests that sampled a token.

    scratch: int64 [num_reqs, num_blocks]. vLLM takes the best block. Here the first one has the best score of all.
    """
    scores, known, lengths = scratch.numpy(), token_ids.numpy(), total_len.numpy()
    for row, (request, sampled) in enumerate(zip(idx_mapping.tolist(), num_sampled.tolist(), strict=True)):
        n, position = _longest_match(known[request, : lengths[request]], MIN_N, MAX_N) if sampled > 0 else (0, 0)
        scores[row] = 0
        scores[row, 0] = n * (L + 1) + position + 1 if n else 0


def _longest_match(tokens: np.ndarray, least: int, most: int) -> tuple[int, int]:
    """How many of the last tokens stand further in front as well, and where the last such place is; 0 for nowhere."""
    best = 0, 0
    ends = np.arange(1, len(tokens))  # behind the last token of a match
    for n in range(1, min(most, len(tokens) - 1) + 1):
        ends = ends[ends >= n]
        ends = ends[tokens[ends - n] == tokens[len(tokens) - n]]
        if not len(ends):
            break
        if n >= least:
            best = n, int(ends[-1]) - n
    return best


@implements("gpu.spec_decode.ngram.speculator._ngram_finalize_kernel", ignores="N_BLOCKS K_PO2 N_BLOCKS_PO2")
def ngram_finalize(
    token_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    total_len: torch.Tensor,
    num_sampled: torch.Tensor,
    last_sampled: torch.Tensor,
    scratch: torch.Tensor,
    drafts: torch.Tensor,
    L: int,
    K: int,
) -> None:
    """The K tokens behind each request's match; the last sampled token where there are none.

    drafts: int64 [max_num_reqs, K].
    """
    known, drafted = token_ids.numpy(), drafts.numpy()
    scores = scratch.numpy()[: len(idx_mapping)].max(1)
    for row, (request, sampled) in enumerate(zip(idx_mapping.tolist(), num_sampled.tolist(), strict=True)):
        drafted[row] = int(last_sampled[request])
        if sampled > 0 and scores[row] > 0:
            begin = sum(divmod(int(scores[row]) - 1, L + 1))
            found = known[request, begin : min(begin + K, int(total_len[request]))]
            drafted[row, : len(found)] = found
