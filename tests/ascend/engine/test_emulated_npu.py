"""The emulated NPU itself: the calls that it supports work, and all others fail."""

import pytest
import torch


def test_torch_npu_finds_a_device():
    assert torch.npu.device_count() == 1
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.npu.get_device_name() == "Ascend910B3"


def test_operators_compute_on_its_memory():
    x = torch.arange(12, dtype=torch.float32, device="npu").view(3, 4)
    rows = x.t()[1:]
    rows[0] += 100
    assert x.device.type == rows.device.type == "npu"
    assert torch.equal((x @ x.T).cpu(), x.cpu() @ x.cpu().T)
    assert x[:, 1].tolist() == [101, 105, 109]
    out = torch.empty(0, device="npu")
    torch.add(x, 1, out=out)
    assert torch.equal(out.cpu(), x.cpu() + 1)
    assert [half.shape for half in torch.cat((x, x), out=torch.empty(6, 4, device="npu")).chunk(2)] == [x.shape] * 2


def test_tensors_of_the_cpu_are_refused():
    x = torch.ones(3, device="npu")
    with pytest.raises(RuntimeError, match="expected all tensors on the emulated NPU, found one on cpu"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="expected all tensors on the emulated NPU"):
        torch.ops.npu.npu_rms_norm(x.view(1, 3), torch.ones(3))
    assert torch.equal((x + torch.tensor(1.0)).cpu(), torch.full((3,), 2.0))


def test_operators_that_nothing_emulates_fail():
    with pytest.raises(RuntimeError):
        torch.ops.npu.npu_mish(torch.ones(3, device="npu"))
        torch.npu.synchronize()


def test_memory_is_counted_and_holds_no_zeros():
    torch.npu.empty_cache()
    free, _ = torch.npu.mem_get_info()
    size = 512 * 2**20  # more than PyTorch's cache may hold
    x = torch.empty(size, dtype=torch.uint8, device="npu")
    assert free - torch.npu.mem_get_info()[0] >= size
    assert (x[::4096].cpu() == 0xFF).all(), "which is NaN in every dtype of floats"


def test_memory_ends():
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(5 * 2**30, dtype=torch.uint8, device="npu")
