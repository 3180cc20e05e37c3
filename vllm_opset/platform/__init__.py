"""vLLM's two entry points: `activate` (vllm.platform_plugins) and `register` (vllm.general_plugins).

OPSET_PLATFORM chooses: `auto` (the default) takes the CPU where PyTorch finds no accelerator, `cpu` takes it anywhere,
`off` steps aside and leaves stock vLLM.

vLLM swallows what a platform plugin raises while it is asked, and skips a plugin that cannot be imported: either way it
would go on without this one. So this module imports nothing that can fail, and every failure is kept until vLLM fetches
the platform class by name, which it does outside of any try.
"""

import functools
import importlib
import logging
import os

CHOICES = ("auto", "cpu", "off")
CURE = "Mend that, or set OPSET_PLATFORM=off to run vLLM without this plugin."

_CLASSES = {"OpsetCpuPlatform": "vllm_opset.platform.cpu"}
_failure: Exception | None = None


class PluginError(RuntimeError):
    """The plugin is installed and wanted, but cannot be used."""


def activate() -> str | None:
    """The qualified name of the platform's class for vLLM to load, or None to step aside."""
    global _failure
    try:
        return _choose()
    except Exception as failure:
        _failure = failure
        return f"{__name__}.Unusable"


def register() -> None:
    """Puts opset's layers and attention backend where vLLM looks for them, if vLLM runs on opset's platform.

    Called by vLLM once in every process, before a model is built. Raises PluginError if another platform runs although
    this one was to be used.
    """
    if activate() is None:
        return
    from vllm.platforms import current_platform

    if type(current_platform).__name__ not in _CLASSES:
        raise PluginError(
            f"vllm-opset should run, but vLLM chose {type(current_platform).__name__}: unset VLLM_TARGET_DEVICE, "
            "or set OPSET_PLATFORM=off to do without vllm-opset."
        )
    _load("vllm_opset.platform.layers").register()
    # Nothing needs these two yet; what is broken in them is said here, where it is seen, not by a dying engine.
    _load("vllm_opset.attention.backend")
    _load_kernels(current_platform.device_type)
    _load("vllm_opset.attention").register()


def __getattr__(name: str):
    if name == "Unusable":
        raise PluginError(f"vllm-opset cannot be used: {_failure} {CURE}") from _failure
    if name in _CLASSES:
        return getattr(_load(_CLASSES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _choose() -> str | None:
    choice = os.environ.get("OPSET_PLATFORM", "auto")
    if choice not in CHOICES:
        from vllm_opset.selection import nearest

        raise ValueError(f"OPSET_PLATFORM={choice!r} is not a choice; {nearest(choice, CHOICES)}.")
    if choice == "off":
        return None
    if choice == "auto" and (accelerator := _accelerator()):
        _log_once(
            f"vllm-opset steps aside: it runs on a CPU, and PyTorch finds {accelerator} (OPSET_PLATFORM=cpu forces)"
        )
        return None
    return f"{__name__}.OpsetCpuPlatform"


def _accelerator() -> str | None:
    """The kind of accelerator that PyTorch can use here, found without initialising it."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or getattr(torch, accelerator.type).device_count() == 0:
        return None
    return accelerator.type


def _load(module: str):
    try:
        return importlib.import_module(module)
    except Exception as failure:
        raise PluginError(
            f"vllm-opset: {module} cannot be imported: {type(failure).__name__}: {failure}. {CURE}"
        ) from failure


def _load_kernels(device: str) -> None:
    from vllm_opset import kernel, selection

    for provider in selection.PREFERENCE[device]:
        if kernel.why_unavailable(provider) is None:
            for module in kernel.modules(provider):
                _load(module)


@functools.cache
def _log_once(message: str) -> None:
    logging.getLogger(f"vllm.{__name__}").info(message)
