"""The devices that commands are told to work on."""

from collections.abc import Collection

import torch
import typer

from vllm_opset.kernel import unavailable
from vllm_opset.selection import nearest


def require(device: str, known: Collection[str]) -> None:
    """Refuses a device that is not known, or that nothing can be put on here."""
    if device not in known:
        raise typer.BadParameter(f"unknown: {device!r}; {nearest(device, known)}", param_hint="--device")
    try:
        torch.empty(0, device=device)
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise typer.BadParameter(
            f"there is no {device} here: {said}{missing(device)}", param_hint="--device"
        ) from error


def missing(device: str) -> str:
    """Why kernels for NPUs cannot be had, where they are asked for."""
    return "".join(f"; {provider}: {reason}" for provider, reason in unavailable().items() if device == "npu")
