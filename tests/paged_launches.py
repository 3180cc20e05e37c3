"""Records the launches of paged_attention's Triton kernel instead of executing them."""

from collections.abc import Callable

import pytest

KERNELS = {
    "decode": ("plan", "attend_decode", "combine_verify"),
    "prefill": ("attend_prefill", "combine_prefill"),
    "prefill_sm90": ("attend_prefill_sm90",),
    "_plan_sm90": ("plan_prefill", "combine_prefill_sm90"),
}


class Recorder:
    """Stands for a kernel whose launches are recorded."""

    def __init__(self, name: str, record: Callable[[str, tuple, dict], None]) -> None:
        self.name, self.record = name, record

    def __getitem__(self, grid):
        return lambda *inputs, **options: self.record(self.name, inputs, options)


def record_launches(monkeypatch: pytest.MonkeyPatch, record: Callable[[str, tuple, dict], None]) -> None:
    """Calls `record` with the name, arguments and constants of each launch."""
    from vllm_opset.kernels.triton import paged_attention

    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(getattr(paged_attention, module), name, Recorder(name, record))
