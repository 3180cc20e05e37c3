"""The types of device on which PyTorch can compute here."""

import torch

from vllm_opset.kernel import Kernel


def here() -> list[str]:
    """The CPU, and the accelerator if PyTorch finds one. The accelerator is not initialised for this."""
    accelerator = torch.accelerator.current_accelerator()
    found = accelerator is not None and torch.get_device_module(accelerator).device_count() > 0
    return ["cpu", accelerator.type] if found else ["cpu"]


def run(kernel: Kernel) -> bool:
    """Whether one of these devices can run this kernel."""
    return any(map(kernel.runs_on, here()))
