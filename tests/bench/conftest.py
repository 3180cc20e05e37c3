"""Ceilings for tests that measure none."""

import pytest
import torch

from vllm_opset.bench import ceilings


@pytest.fixture
def given_ceilings(monkeypatch) -> None:
    """Replaces the measurement, which takes ten seconds where the processor has no instructions for bf16."""
    given = ceilings.Ceilings(1e10, 1e12, torch.float32)
    monkeypatch.setattr(ceilings, "measure", lambda *_: given)
