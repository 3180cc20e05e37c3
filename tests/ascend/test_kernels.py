"""The Ascend kernels over the emulation: the whole parity suite of the contracts, for each limit and product."""

import emulation
import pytest
from checks import DEVICES, KERNELS, run_checks
from emulation import Limits

each_kernel = pytest.mark.parametrize(("op", "kernel"), KERNELS, ids=lambda value: getattr(value, "name", value))


def failures(op, kernel, limits) -> list[str]:
    checks = run_checks(op, kernel, limits)
    return [f"{check.dtype} {check.case}: {check.failure}" for check in checks if check.failure]


@pytest.mark.parametrize("limits", Limits, ids=lambda limits: limits.value)
@each_kernel
def test_kernel_keeps_its_contract(op, kernel, limits):
    with emulation.mode(limits) as calls:
        failed = failures(op, kernel, limits)
    assert not failed, "\n".join(failed)
    assert calls, "not one operator of torch_npu was called"


@pytest.mark.parametrize("product", ["A3", "A5", "310P"])
@each_kernel
def test_kernel_refuses_what_a_product_does_not_have(op, kernel, product):
    """Whatever a kernel does not refuse must run within the documented limits of that product."""
    with emulation.mode(Limits.STRICT, DEVICES[product]):
        failed = failures(op, kernel, Limits.STRICT)
    assert not failed, "\n".join(failed)
