"""Checks of the commands' arguments: known names, dtypes, devices and files, with errors for invalid ones."""

import importlib.util
import os
from collections.abc import Collection
from pathlib import Path

import torch
import typer

from vllm_opset.devices import here
from vllm_opset.kernel import unavailable
from vllm_opset.overrides import nearest

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
PICTURES = (".png", ".svg", ".pdf")


def known(name: str, names: Collection[str], hint: str) -> str:
    """Return the name if it is one of `names`. hint: the option for which it was given."""
    if name not in names:
        raise typer.BadParameter(f"unknown: {name!r}; {nearest(name, names)}", param_hint=hint)
    return name


def given(context: typer.Context) -> dict[str, str]:
    """The words of the command line by parameter: the names of an option, or what an argument was given."""
    found = (one for one in context.command.params if context.get_parameter_source(one.name).name == "COMMANDLINE")
    return {
        one.name: "/".join([*one.opts, *one.secondary_opts]) if one.param_type_name == "option"
        else " ".join(context.params[one.name])
        for one in found
    }  # fmt: skip


def device_here(devices: Collection[str]) -> str:
    """The accelerator of this machine if it is one of `devices`; else the CPU."""
    return next((device for device in reversed(here()) if device in devices), "cpu")


def require_device(device: str, devices: Collection[str]) -> None:
    """Refuse a device that is not one of `devices`, or on which no tensor can be created here."""
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
    """Return a file to write at the end of the work. Refuse it if that cannot be done."""
    if file is not None and not file.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {file.parent}")
    if file is not None and file.is_dir():
        raise typer.BadParameter(f"{file} is a folder: name a file in it")
    if file is not None and not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise typer.BadParameter(f"{file} cannot be written: permission denied")
    return file


def folder(path: Path | None) -> Path | None:
    """Return a folder that may have to be made. Refuse the path of a file."""
    if path is not None and path.exists() and not path.is_dir():
        raise typer.BadParameter(f"{path} is no folder")
    return path


def picture(file: Path | None) -> Path | None:
    """Return a file for matplotlib to write. Refuse it as `writable` does, without matplotlib, or in another format."""
    if file is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("matplotlib is not installed: pip install '.[plot]' in a clone")
    if file is not None and file.suffix not in PICTURES:
        raise typer.BadParameter(f"{file} has none of the endings {', '.join(PICTURES)}")
    return writable(file)


def missing(device: str) -> str:
    """Why kernels for NPUs are unavailable, if the device is an NPU."""
    reason = unavailable().get("ascend")
    return f"; ascend: {reason}" if device == "npu" and reason else ""
