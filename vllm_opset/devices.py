"""The types of device that PyTorch can compute on here."""

import torch

from vllm_opset.kernel import Kernel


def here() -> list[str]:
    """The CPU, and the accelerator if PyTorch finds one. It is not initialised to find out."""
    accelerator = torch.accelerator.current_accelerator()
    found = accelerator is not None and torch.get_device_module(accelerator).device_count() > 0
    return ["cpu", accelerator.type] if found else ["cpu"]


def run(kernel: Kernel) -> bool:
    """Whether one of them runs this kernel."""
    return any(map(kernel.runs_on, here()))
