"""Overrides of ops that no layer calls are warned of."""

import re
from pathlib import Path

import pytest
from small_models import QWEN3

import vllm_opset
from vllm_opset import ops
from vllm_opset.platform import overridden
from vllm_opset.selection import Override

pytestmark = pytest.mark.window


def test_an_override_of_an_op_that_no_layer_calls_is_warned_of(configure, monkeypatch):
    from vllm_opset.platform import base  # after the plugin is registered

    warnings = []
    monkeypatch.setattr(base.logger, "warning_once", lambda message, *args: warnings.append(message % args))
    monkeypatch.setenv("OPSET_KERNELS", "permute=reference,rms_norm=reference")
    configure(QWEN3, dtype="float32")
    (warning,) = set(warnings)
    assert warning.startswith("OPSET_KERNELS asks for permute=reference, which has no effect: no layer calls this op.")


@pytest.mark.parametrize("second_runner", [True, False])
def test_an_override_for_the_first_runner_is_warned_of_beside_the_second(second_runner):
    asked = {op.name: Override("reference", "OPSET_KERNELS") for op in overridden.BY_FIRST_RUNNER}
    warnings = list(overridden.not_called(asked, second_runner))
    assert len(warnings) == (len(asked) if second_runner else 0)
    assert all("only vLLM's first model runner calls this op" in warning for warning in warnings)


def test_no_layer_calls_these_ops():
    package = Path(vllm_opset.__file__).parent
    files = (file for name in ("attention", "model", "platform") for file in (package / name).rglob("*.py"))
    text = "".join(file.read_text() for file in files if file.name != Path(overridden.__file__).name)
    assert [op for op in ops.ALL if not re.search(rf"\bops\.{op.name}\b", text)] == [
        op for op in ops.ALL if op in overridden.BY_NO_LAYER
    ]
