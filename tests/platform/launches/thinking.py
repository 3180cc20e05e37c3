"""Kernels that limit how long a request may think."""

import torch

from launches._launch import LENGTH, ROOM, Launch, Rows, ints, of, some


def _thinking(random) -> tuple[Rows, dict]:
    rows = Rows(random)
    rows.batch.known %= 4  # so that markers match
    return rows, {
        "thinking_token_budget": ints(random, -1, 12, ROOM),
        "all_token_ids": rows.batch.known,
        "total_len": rows.batch.total,
        "reasoning_start_token_ids": torch.tensor([1, 2], dtype=torch.int32),
        "natural_reasoning_end_token_ids": torch.tensor([3, 0, 1], dtype=torch.int32),
        "START_LEN": 2,
        "NATURAL_END_LEN": 3,
    }


@of("gpu.sample.thinking_budget._update_committed_marker_cache_kernel")
def update_committed_marker_cache(random):
    rows, values = _thinking(random)
    values |= {
        "req_ids": rows.batch.requests,
        "cached_last_start": torch.full((ROOM,), -1, dtype=torch.int32),
        "cached_last_end": torch.full((ROOM,), -1, dtype=torch.int32),
        "cached_scan_pos": some(random, ints(random, 1, LENGTH, ROOM), 0),
        "MAX_LEN": 3,
        "BLOCK": 16,
    }
    first_search = (values["cached_scan_pos"] == 0) | (values["cached_scan_pos"] > rows.batch.total)

    def compared(after):
        """The first search may stop at the last marker of all. Where it found one, only their order matters."""
        begin, end = after["cached_last_start"], after["cached_last_end"]
        return {
            "thinks": begin > end,
            "start": torch.where(first_search & (begin <= end), -1, begin),
            "end": torch.where(first_search & (begin > end), -1, end),
            "searched": after["cached_scan_pos"],
        }

    return Launch((rows.batch.size,), values, compared)


@of("gpu.sample.thinking_budget._thinking_budget_kernel")
def thinking_budget(random):
    rows, values = _thinking(random)
    length, begin = rows.batch.total, ints(random, -1, 6, ROOM)
    values |= {
        "logits": rows.logits,
        "expanded_idx_mapping": rows.requests,
        "input_ids": rows.inputs % 4,
        "expanded_local_pos": rows.places,
        "cached_last_start": torch.where(begin < 0, -1, (length - 8 + begin).clamp(min=-1)),
        "cached_last_end": some(random, (length - ints(random, 4, 9, ROOM)).clamp(min=-1), -1),
        "reasoning_end_token_ids": torch.tensor([3, 0, 3, 1], dtype=torch.int32),
        "END_LEN": 4,
    }
    return Launch((rows.number,), values)
