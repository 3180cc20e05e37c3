"""What commands are told to work on: words of a list, dtypes and devices, refused where they are not known."""

from collections.abc import Collection

import torch
import typer

from vllm_opset.kernel import unavailable
from vllm_opset.selection import nearest

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}


def known(word: str, words: Collection[str], hint: str) -> str:
    """The word, if it is one of these. hint: the option that it was given by."""
    if word not in words:
        raise typer.BadParameter(f"unknown: {word!r}; {nearest(word, words)}", param_hint=hint)
    return word


def require_device(device: str, devices: Collection[str]) -> None:
    """Refuses a device that is none of these, or that nothing can be put on here."""
    known(device, devices, "--device")
    try:
        torch.empty(0, device=device)
    except Exception as error:
        reason = str(error).partition("\n")[0] + missing(device)
        raise typer.BadParameter(f"there is no {device} here: {reason}", param_hint="--device") from error


def missing(device: str) -> str:
    """Why kernels for NPUs cannot be had, where they are asked for."""
    reason = unavailable().get("ascend")
    return f"; ascend: {reason}" if device == "npu" and reason else ""
