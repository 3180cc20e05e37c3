"""In a process that has the emulated NPU, the plugin changes what the registry of bridges declares."""

import emulated_npu
from changes import declared, found


def test_the_declared_changes_are_all():
    assert found("npu", **emulated_npu.variables()) == {"npu": declared("npu")}
