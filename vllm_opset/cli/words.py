"""What commands are told: words of a list, dtypes, devices and files, refused where they cannot be had."""

from collections.abc import Collection
from pathlib import Path

import torch
import typer

from vllm_opset.devices import here
from vllm_opset.kernel import unavailable
from vllm_opset.selection import nearest

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
PICTURES = (".png", ".svg", ".pdf")


def known(word: str, words: Collection[str], hint: str) -> str:
    """The word, if it is one of these. hint: the option that it was given by."""
    if word not in words:
        raise typer.BadParameter(f"unknown: {word!r}; {nearest(word, words)}", param_hint=hint)
    return word


def require_device(device: str, devices: Collection[str]) -> None:
    """Refuses a device that is none of these, or that nothing can be put on here."""
    if device not in devices:
        able = [other for other in devices if other in here()]
        raise typer.BadParameter(
            f"unknown: {device!r}; known: {', '.join(devices)}; here: {', '.join(able)}", param_hint="--device"
        )
    try:
        torch.empty(0, device=device)
    except Exception as error:
        reason = str(error).partition("\n")[0] + missing(device)
        raise typer.BadParameter(f"there is no {device} here: {reason}", param_hint="--device") from error


def writable(file: Path | None) -> Path | None:
    """A file to write when the work is done."""
    if file is not None and not file.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {file.parent}")
    return file


def picture(file: Path | None) -> Path | None:
    """The same, for matplotlib to draw."""
    if file is not None and file.suffix not in PICTURES:
        raise typer.BadParameter(f"{file} has none of the endings {', '.join(PICTURES)}")
    return writable(file)


def missing(device: str) -> str:
    """Why kernels for NPUs cannot be had, where they are asked for."""
    reason = unavailable().get("ascend")
    return f"; ascend: {reason}" if device == "npu" and reason else ""
