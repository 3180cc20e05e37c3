"""The contract's samples of paged_attention launch every kernel that Triton's interpreter can run, in every form."""

import pytest
import torch
from paged_launches import record_launches

from vllm_opset import ops
from vllm_opset.kernel import kernels_of
from vllm_opset.kernels.triton.paged_attention import prefill_sm90

FORMS = {"plan", "attend_decode", "combine_verify", "attend_prefill", "attend_prefill, split", "combine_prefill"}
LEAST_COLUMNS = 16  # that a matrix instruction takes, of a head however small


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_samples_reach_every_kernel(dtype, monkeypatch):
    launched, columns = set(), set()

    def record(name: str, inputs: tuple, options: dict) -> None:
        launched.add(f"{name}, split" if options.get("SPLIT") else name)
        columns.add(options.get("BLOCK_D", LEAST_COLUMNS))

    record_launches(monkeypatch, record)
    monkeypatch.setattr(prefill_sm90, "available", lambda device: False)
    kernel = kernels_of("paged_attention")["triton"]
    for sample in ops.paged_attention.samples("cpu", dtype):
        args, kwargs = sample.make()
        if kernel.supports(ops.paged_attention.problem_for(*args, **kwargs)) is None:
            kernel.run(*args, **kwargs)
    assert launched == FORMS
    assert min(columns) == LEAST_COLUMNS
