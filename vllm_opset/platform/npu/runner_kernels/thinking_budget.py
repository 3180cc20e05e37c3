"""The kernels of `vllm.v1.worker.gpu.sample.thinking_budget`. See `runner_kernels._thinking`."""

import torch

from vllm_opset.platform.npu.runner_kernels._registry import implements
from vllm_opset.platform.npu.runner_kernels._sampling import recent_tokens
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
    requests = req_ids.long()
    tokens, lengths = all_token_ids[requests], total_len[requests, None]
    budgeted, scanned = thinking_token_budget[requests] >= 0, cached_scan_pos[requests, None]
    begins = scanned.masked_fill(scanned > lengths, 0)
    for place, marker in (
        (cached_last_start, reasoning_start_token_ids),
        (cached_last_end, natural_reasoning_end_token_ids),
    ):
        windows = tokens.unfold(1, len(marker), 1)
        starts = torch.arange(windows.shape[1], dtype=place.dtype, device=tokens.device)
        found = (windows == marker).all(2) & (starts >= begins) & (starts + len(marker) <= lengths)
        newest = torch.where(found, starts, torch.full_like(starts, NOWHERE)).amax(1)
        known = place[requests].masked_fill((scanned > lengths)[:, 0], NOWHERE)
        place[requests] = torch.where(budgeted, torch.maximum(known, newest), place[requests])
    searched = (lengths[:, 0] - MAX_LEN + 1).clamp(min=0).to(cached_scan_pos.dtype)
    cached_scan_pos[requests] = torch.where(budgeted, searched, cached_scan_pos[requests])


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
    requests = expanded_idx_mapping
    longest = max(map(len, (reasoning_start_token_ids, natural_reasoning_end_token_ids, reasoning_end_token_ids)))
    # A row has fewer drafts than there are rows, and a marker that is not known ends with one of them.
    width = len(logits) + longest - 1
    back = torch.arange(width, 0, -1, device=logits.device)
    recent = recent_tokens(back, requests, all_token_ids, total_len, input_ids, expanded_local_pos)
    lengths = total_len[requests]
    written = lengths + expanded_local_pos
    places = written[:, None] - back

    def last(marker: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """The last place of a marker. One that lies in the request's tokens as a whole is known."""
        begins = places[:, : width - len(marker) + 1]
        found = (recent.unfold(1, len(marker), 1) == marker).all(2)
        found &= (begins >= 0) & (begins + len(marker) > lengths[:, None])
        return torch.maximum(begins.masked_fill(~found, NOWHERE).amax(1), known[requests])

    started = last(reasoning_start_token_ids, cached_last_start)
    ended = last(natural_reasoning_end_token_ids, cached_last_end)
    budget = thinking_token_budget[requests]
    spent = (budget >= 0) & (started > ended) & (written - started - len(reasoning_start_token_ids) >= budget)

    forced = torch.zeros_like(requests)
    for number in range(1, len(reasoning_end_token_ids)):
        begun = (recent[:, width - number :] == reasoning_end_token_ids[:number]).all(1) & (number <= written)
        forced.masked_fill_(begun, number)
    tokens = reasoning_end_token_ids[forced].long()[:, None]
    logits.scatter_(1, tokens, logits.gather(1, tokens).masked_fill_(spent[:, None], FORCED))
