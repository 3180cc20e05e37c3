"""A stand-in for torchvision where it is absent, as in the project's environments: PyPI has builds for CUDA alone."""

import sys
from unittest.mock import MagicMock

from vllm_opset.platform import multimodal

MODULES = ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")


def install(monkeypatch) -> None:
    """Let modules import torchvision. transformers goes on without it: it opens images by Pillow, and no videos."""
    from transformers.utils import import_utils

    # transformers keeps these answers.
    if import_utils.is_torchvision_available() and import_utils.is_torchvision_v2_available():
        return
    for name in ("torchvision", *(f"torchvision.{module}" for module in MODULES)):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.setattr(multimodal, "has_torchvision", lambda: True)
