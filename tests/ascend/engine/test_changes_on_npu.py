"""What the plugin changes in a process that has the emulated NPU. See tests/platform/test_changes.py."""

import emulated_npu
from changes import declared, found


def test_the_declared_changes_are_all():
    assert found("npu", **emulated_npu.variables()) == declared("npu")
