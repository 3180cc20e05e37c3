"""Every kernel that runs on this machine's CPU, against its contract. Generated: a new kernel file is tested at once."""

import pytest

from vllm_opset import ops, parity
from vllm_opset.kernel import kernels_of
from vllm_opset.selection import PREFERENCE, REFERENCE

DEVICE = "cpu"
KERNELS = [
    (op, kernel)
    for op in ops.ALL
    for kernel in kernels_of(op.name).values()
    if kernel.provider in (*PREFERENCE[DEVICE], REFERENCE)
]


@pytest.mark.parametrize(("op", "kernel"), KERNELS, ids=lambda value: getattr(value, "name", value))
def test_kernel_keeps_its_contract(op, kernel):
    checks = list(parity.check_kernel(op, kernel, DEVICE))
    assert any(check.skipped is None for check in checks), "not one sample was run"
    failures = [f"{check.dtype} {check.case}: {check.failure}" for check in checks if not check.passed]
    assert not failures, "\n".join(failures)
