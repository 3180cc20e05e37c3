"""Kernels that a test adds, and problems for which they are asked. Import `clean` beside them."""

import pytest
import torch

from vllm_opset import kernel as registry
from vllm_opset import ops, selection
from vllm_opset.kernel import Kernel, kernels_of
from vllm_opset.ops.contract import Problem
from vllm_opset.ops.norm.layer_norm import LayerNormProblem

NORM = LayerNormProblem("cpu", torch.float32, 64, torch.float32)
ACTIVATION = Problem("cpu", torch.float32)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No overrides, no choices, and a registry that forgets the kernels that a test adds."""
    kernels_of("layer_norm")
    monkeypatch.setattr(registry, "_registry", {op: dict(known) for op, known in registry._registry.items()})
    monkeypatch.setattr(selection, "_overrides", None)
    monkeypatch.setattr(selection, "_choices", {})
    for name in ("OPSET_KERNELS", "OPSET_CONFIG", "OPSET_IMPORT", "OPSET_COUNT_CALLS"):
        monkeypatch.delenv(name, raising=False)


def add_kernel(
    op: str = "layer_norm", name: str = "mine", provider="tests", devices=(), refuses=None, run=None
) -> Kernel:
    """Add a kernel to the registry. By default it is the reference of layer_norm, by another name."""
    new = Kernel(op, name, provider, devices, lambda problem: refuses, run or ops.BY_NAME[op].reference)
    registry._registry[op][name] = new
    return new
