"""Counters by which the last of several programs that share a result knows that it is the last."""

import torch

COUNTERS = 1 << 14  # more than a launch with several programs a result has results

_counters: dict[tuple[torch.device, int], torch.Tensor] = {}
_replaced: list[torch.Tensor] = []  # which graphs may still use


def zeros(device: torch.device, number: int) -> torch.Tensor:
    """Counters that each launch leaves at zero, for the launches of a stream, which run one after the other.

    Those that are made while a CUDA graph is captured belong to the graph, which sets them to zero.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found = _counters.get((device, stream))
    if found is not None and len(found) >= number:
        return found
    made = torch.zeros(max(number, COUNTERS), dtype=torch.int32, device=device)
    if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        if found is not None:
            _replaced.append(found)
        _counters[device, stream] = made
    return made
