"""A kernel that raises reports its inputs, and no other kernel replaces it."""

import dataclasses

import pytest
import torch

from vllm_opset import failures, ops
from vllm_opset.kernel import kernels_of
from vllm_opset.ops.attention.paged_batch import packed_batch, packed_cache


def failing(op: str):
    def run(*args, **kwargs):
        raise RuntimeError("out of registers")

    kernel = dataclasses.replace(kernels_of(op)["reference"], name="mine", provider="my_module", run=run)
    return failures.explained(kernel, kernel.run)


def note(run, *args, **kwargs) -> str:
    with pytest.raises(RuntimeError, match="out of registers") as raised:
        run(*args, **kwargs)
    (text,) = raised.value.__notes__
    return text


def test_the_note_names_op_kernel_shapes_and_strides():
    x = torch.zeros(4, 8, dtype=torch.bfloat16).t()
    assert note(failing("rms_norm"), x, None, epsilon=1e-6) == (
        "vllm-opset: rms_norm=mine of my_module raised this for "
        "x bfloat16 [8, 4], strides [1, 8], cpu; weight None; epsilon 1e-06"
    )


def test_the_note_looks_into_a_batch():
    key = torch.zeros(3, 1, 16)
    batch = packed_batch(torch.tensor([0, 3], dtype=torch.int32), 3)
    text = note(failing("paged_attention"), key, packed_cache(key, key), batch, key, scale=1.0)
    assert "batch.seq_lens int32 [1], strides [1], cpu" in text and "batch.max_query_len 3" in text


def test_what_does_not_raise_is_returned():
    run = failures.explained(kernels_of("relu2")["reference"], ops.relu2.reference)
    assert torch.equal(run(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 4.0]))
