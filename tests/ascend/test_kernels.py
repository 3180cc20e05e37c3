"""The Ascend kernels over the emulation: the whole parity suite of the contracts, with and without fp32."""

import emulation
import pytest
from emulation import Limits
from kernels import KERNELS, run_checks


@pytest.mark.parametrize("limits", Limits, ids=lambda limits: limits.value)
@pytest.mark.parametrize(("op", "kernel"), KERNELS, ids=lambda value: getattr(value, "name", value))
def test_kernel_keeps_its_contract(op, kernel, limits):
    with emulation.mode(limits) as calls:
        checks = list(run_checks(op, kernel, limits))
    failures = [f"{check.dtype} {check.case}: {check.failure}" for check in checks if not check.passed]
    assert not failures, "\n".join(failures)
    assert calls, "not one operator of torch_npu was called"
