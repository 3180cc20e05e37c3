"""A GPU's views of pinned memory."""

import gc

import pytest
import torch

from vllm_opset.platform.cuda.pinned import view_on_gpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: runs on one")


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32])
def test_both_sides_see_what_the_other_writes(dtype):
    memory = torch.zeros(3, 5, dtype=dtype, pin_memory=True)
    view = view_on_gpu(memory)
    assert view.is_cuda and view.dtype == dtype and view.shape == memory.shape
    memory[1, 2] = 1
    assert view.sum().item() == 1 and view[1, 2].item() == 1
    view[2, 4] = 1
    torch.cuda.synchronize()
    assert memory[2, 4].item() == 1


def test_a_view_keeps_its_memory():
    view = view_on_gpu(torch.arange(1000, dtype=torch.int32).pin_memory())
    gc.collect()
    others = [torch.zeros(1000, dtype=torch.int32, pin_memory=True) for _ in range(20)]
    assert view.sum().item() == 499500 and not any(other.any() for other in others)


def test_nothing_can_be_viewed():
    assert view_on_gpu(torch.zeros(0, 32, dtype=torch.int32, pin_memory=True)).shape == (0, 32)


def test_memory_that_is_not_pinned_is_an_error():
    with pytest.raises(RuntimeError, match="not pinned"):
        view_on_gpu(torch.zeros(3))
