"""What the contract's samples of paged_attention launch in Triton's interpreter: all that it can run, in every form."""

import pytest
import torch

from vllm_opset import ops
from vllm_opset.kernel import kernels_of
from vllm_opset.kernels.triton import paged_attention

KERNELS = {"_few": ("plan", "attend_few", "merge_few"), "_many": ("attend_many", "merge_many")}
FORMS = {"plan", "attend_few", "merge_few", "attend_many", "attend_many, split", "merge_many"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_samples_reach_every_kernel(dtype, monkeypatch):
    launched = set()

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid):
            return lambda *_, **options: launched.add(f"{self.name}, split" if options.get("SPLIT") else self.name)

    for part, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(getattr(paged_attention, part), name, Recorder(name))
    monkeypatch.setattr(paged_attention, "INTERPRETED", True)
    kernel = kernels_of("paged_attention")["triton"]
    for sample in ops.paged_attention.samples("cpu", dtype):
        args, kwargs = sample.make()
        if kernel.supports(ops.paged_attention.describe(*args, **kwargs)) is None:
            kernel.run(*args, **kwargs)
    assert launched == FORMS
