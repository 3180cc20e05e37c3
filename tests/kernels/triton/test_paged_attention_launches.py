"""The contract's samples of paged_attention launch every kernel that Triton's interpreter can run, in every form."""

import pytest
import torch
from paged_launches import record_launches

from vllm_opset import ops
from vllm_opset.kernel import kernels_of
from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton.paged_attention import prefill_sm90
from vllm_opset.ops.attention.paged_batch import PagedBatch
from vllm_opset.ops.schemes import FP8

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


@pytest.mark.parametrize(
    ("head_size", "width"), [(16, 64), (64, 64), (80, 128), (128, 128), (192, 256), (256, 256), (512, 256)]
)
def test_an_fp8_cache_has_launch_parameters_of_its_own(head_size, width, monkeypatch):
    asked, of_table = set(), _launch.parameters
    monkeypatch.setattr(_launch, "parameters", lambda launch, *rest: (asked.add(launch), of_table(launch, *rest))[1])
    record_launches(monkeypatch, lambda name, inputs, options: None)
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([100], dtype=torch.int32)
    query, one = torch.zeros(1, 4, head_size, dtype=torch.bfloat16), torch.ones(1)
    for dtype, name in ((torch.bfloat16, "paged_attention_decode"), (FP8, f"fp8_{width}_paged_attention_decode")):
        asked.clear()
        batch = PagedBatch(starts, lens, torch.zeros(1, 16, dtype=torch.int32), 1, 100)
        scales = {"k_scale": one, "v_scale": one} if dtype == FP8 else {}
        cache = torch.zeros(7, 2, 16, 2 * head_size, dtype=dtype)
        kernels_of("paged_attention")["triton"].run(query, cache, batch, query, scale=1.0, **scales)
        assert name in asked and not any(launch.endswith("_decode") for launch in asked - {name})
