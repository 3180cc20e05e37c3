"""The kernels of `vllm.v1.worker.gpu.sample.thinking_budget`. See `runner_kernels._thinking`."""

import torch

from vllm_opset.platform.cpu.runner_kernels._memory import recent_tokens
from vllm_opset.platform.cpu.runner_kernels._registry import implements
from vllm_opset.platform.runner_kernels._thinking import FORCED, NOWHERE


@implements(
    "gpu.sample.thinking_budget._update_committed_marker_cache_kernel", ignores="START_LEN NATURAL_END_LEN BLOCK"
)
def update_committed_marker_cache(
    req_ids: torch.Tensor,
    thinking_token_budget: torch.Tensor,
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
    cached_last_start: torch.Tensor,
    cached_last_end: torch.Tensor,
    cached_scan_pos: torch.Tensor,
    reasoning_start_token_ids: torch.Tensor,
    natural_reasoning_end_token_ids: torch.Tensor,
    MAX_LEN: int,
) -> None:
    """Note where the last markers of each request begin, and up to where its tokens were searched."""
    markers = (
        (cached_last_start, reasoning_start_token_ids.tolist()),
        (cached_last_end, natural_reasoning_end_token_ids.tolist()),
    )
    for request in req_ids.tolist():
        if thinking_token_budget[request] < 0:
            continue
        length = int(total_len[request])
        scanned = int(cached_scan_pos[request])
        anew = scanned > length
        tokens = all_token_ids[request, :length].tolist()
        for place, marker in markers:
            known = NOWHERE if anew else int(place[request])
            place[request] = max(known, last(marker, tokens, 0 if anew else scanned))
        cached_scan_pos[request] = max(0, length - MAX_LEN + 1)


@implements("gpu.sample.thinking_budget._thinking_budget_kernel", ignores="START_LEN NATURAL_END_LEN END_LEN")
def thinking_budget(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    thinking_token_budget: torch.Tensor,
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
    input_ids: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    cached_last_start: torch.Tensor,
    cached_last_end: torch.Tensor,
    reasoning_start_token_ids: torch.Tensor,
    natural_reasoning_end_token_ids: torch.Tensor,
    reasoning_end_token_ids: torch.Tensor,
) -> None:
    """Force the next token of the end marker in rows whose request has spent its budget, in place."""
    begin, end = reasoning_start_token_ids.tolist(), natural_reasoning_end_token_ids.tolist()
    forced = reasoning_end_token_ids.tolist()
    for row, request in enumerate(expanded_idx_mapping.tolist()):
        budget, length = int(thinking_token_budget[request]), int(total_len[request])
        if budget < 0:
            continue
        tokens = recent_tokens(row, request, all_token_ids, total_len, input_ids, expanded_local_pos)
        # Markers that lie in the request's tokens as a whole are known. Others reach into the drafts.
        started = max(int(cached_last_start[request]), last(begin, tokens, max(0, length - len(begin) + 1)))
        ended = max(int(cached_last_end[request]), last(end, tokens, max(0, length - len(end) + 1)))
        thinks = started > ended
        if thinks and len(tokens) - started - len(begin) >= budget:
            written = max(n for n in range(len(forced)) if n == 0 or tokens[-n:] == forced[:n])
            logits[row, forced[written]] = FORCED


def last(marker: list[int], tokens: list[int], begin: int) -> int:
    """The last place from `begin` on where the marker stands in the tokens as a whole, or NOWHERE."""
    places = range(len(tokens) - len(marker), begin - 1, -1)
    return next((place for place in places if tokens[place : place + len(marker)] == marker), NOWHERE)
