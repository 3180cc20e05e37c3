"""torch_npu imports without a driver: with its real operators, and without a device to run them on."""

import pytest
import torch


def test_there_is_no_driver_and_no_device(missing_libraries):
    assert "libascendcl.so" in missing_libraries, "CANN is installed: this is no test of the stand-ins"
    assert not torch.npu.is_available() and torch.npu.device_count() == 0


def test_nothing_can_be_put_on_a_device():
    with pytest.raises(RuntimeError):
        torch.ones(1, device="npu")


def test_the_real_operators_are_there():
    assert "epsilon" in str(torch.ops.npu.npu_rms_norm.default._schema)
    x = torch.ones(3, 8, device="meta", dtype=torch.bfloat16)
    y, rstd = torch.ops.npu.npu_rms_norm(x, x[0])
    assert y.shape == x.shape and rstd.dtype == torch.float32
