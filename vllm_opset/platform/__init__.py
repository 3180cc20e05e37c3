"""vLLM's two entry points: `activate` (vllm.platform_plugins) and `register` (vllm.general_plugins).

The variable OPSET_PLATFORM chooses the platform. `auto`, the default, has three outcomes:

- It takes a platform: the NVIDIA GPUs or Ascend NPUs that PyTorch was built for, or the CPU if PyTorch was built for no
  accelerator. On GPUs it takes `native` if vLLM has its compiled kernels: vLLM's own platform with parts of opset.
  Otherwise it takes `cuda`, which needs no compiled kernels.
- It does not activate, and stock vLLM serves, if vLLM was built for CPUs, or if PyTorch was built for another
  accelerator that it can use, such as AMD's GPUs.
- It raises an error if PyTorch was built for an accelerator and cannot use it. No server falls back to the CPU because
  a driver broke or another process hid the GPUs. GPUs that Ray hides from a driver are no error for `native`.

`cpu`, `cuda`, `native` and `npu` take that platform, or raise an error if it cannot be used. `off` activates none.

vLLM swallows an exception that a platform plugin raises in its entry point, and skips a plugin that cannot be imported.
In both cases vLLM would go on without this plugin. So this module imports nothing that can fail. It keeps every failure
until vLLM fetches the platform class by name, because vLLM does that outside any `try`.
"""

import functools
import importlib
import logging
import os

from vllm_opset.platform import release, stock

CHOICES = ("auto", "cpu", "cuda", "native", "npu", "off")
CURE = "Fix that, or set OPSET_PLATFORM=off to run vLLM without this plugin, if it has kernels of its own."

_CLASSES = {
    "OpsetCpuPlatform": "vllm_opset.platform.cpu.platform",
    "OpsetCudaPlatform": "vllm_opset.platform.cuda.platform",
    "OpsetNativePlatform": "vllm_opset.platform.native.platform",
    "OpsetNpuPlatform": "vllm_opset.platform.npu.platform",
}
_OF_CHOICE = {
    "cpu": "OpsetCpuPlatform",
    "cuda": "OpsetCudaPlatform",
    "native": "OpsetNativePlatform",
    "npu": "OpsetNpuPlatform",
}
_failure: Exception | None = None


class PluginError(RuntimeError):
    """The plugin is installed and wanted, but cannot be used."""


def activate() -> str | None:
    """Return the qualified name of the platform class for vLLM to load, or None if opset does not activate."""
    global _failure
    try:
        return _choose()
    except Exception as failure:
        _failure = failure
        return f"{__name__}.Unusable"


def register() -> None:
    """Register opset's layers and attention backend with vLLM, if vLLM runs on opset's platform.

    vLLM calls this once in every process, before it builds a model. Raises PluginError if vLLM chose another platform
    although this one should run.
    """
    if activate() is None:
        return
    from vllm.platforms import current_platform

    if type(current_platform).__name__ not in _CLASSES:
        raise PluginError(
            f"vllm-opset should run, but vLLM chose {type(current_platform).__name__}: unset VLLM_TARGET_DEVICE, "
            "or set OPSET_PLATFORM=off to do without vllm-opset."
        )
    if current_platform.is_out_of_tree():
        _load("vllm_opset.model.registration").register()
        current_platform.prepare()
    # Nothing needs these two yet. They are imported here so that a broken one is reported now, not by a dying engine.
    _load("vllm_opset.attention.backend")
    _load_kernels(current_platform.device_type)
    _load("vllm_opset.attention").register(current_platform.attention_backend)


def __getattr__(name: str):
    if name == "Unusable":
        raise PluginError(f"vllm-opset cannot be used: {_failure} {CURE}") from _failure
    if name in _CLASSES:
        return getattr(_load(_CLASSES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _choose() -> str | None:
    choice = os.environ.get("OPSET_PLATFORM") or "auto"
    if choice not in CHOICES:
        raise ValueError(f"OPSET_PLATFORM={choice!r} is not a choice; known: {', '.join(CHOICES)}.")
    if choice == "off":
        _warn_where_vllm_has_no_kernels()
        return None
    release.check()
    if choice == "auto":
        choice = _best()
        if choice not in _OF_CHOICE:
            _log_once(
                logging.INFO, f"vllm-opset does not activate: {choice} (OPSET_PLATFORM=cpu takes the CPU with opset's)"
            )
            return None
    if choice == "native" and not stock.has_kernels_for_cuda():
        raise ValueError(
            "OPSET_PLATFORM=native needs vLLM's own wheel for CUDA; this vLLM has no compiled kernels "
            "(OPSET_PLATFORM=cuda does without them)."
        )
    if choice in ("cuda", "native") and (reason := _why_no_gpu(choice)):
        raise ValueError(f"no NVIDIA GPU can be used: {reason}.")
    if choice == "npu" and (reason := _why_no_npu()):
        raise ValueError(f"OPSET_PLATFORM=npu: {reason}.")
    return f"{__name__}.{_OF_CHOICE[choice]}"


def _best() -> str:
    """The choice for this machine, or a reason not to activate. Raises ValueError if the accelerator cannot be used."""
    if stock.has_kernels_for_cpus():
        return "this vLLM was built for CPUs and has kernels of its own"
    wanted = _accelerator()
    if wanted is None:
        return "cpu"
    choice = "native" if wanted == "cuda" and stock.has_kernels_for_cuda() else wanted
    if reason := _why_no_gpu(choice) if wanted == "cuda" else _why_none_is_found(wanted):
        raise ValueError(
            f"this PyTorch was built for {wanted}, and cannot use it: {reason}. "
            "To take the CPU, set OPSET_PLATFORM=cpu."
        )
    return choice if choice in _OF_CHOICE else f"it has no kernels for {wanted}"


def _warn_where_vllm_has_no_kernels() -> None:
    """Warn early, because vLLM's own error comes later and only mentions an empty device string."""
    if not stock.has_kernels():
        _log_once(
            logging.WARNING,
            "OPSET_PLATFORM=off leaves out vllm-opset, and this vLLM was built without compiled kernels: it finds no "
            "device, unless another package brings kernels. Unset OPSET_PLATFORM, or install a vLLM built for this "
            "machine.",
        )


def _why_no_gpu(choice: str) -> str | None:
    """Why `cuda` or `native` cannot use an NVIDIA GPU; None if it can."""
    from vllm_opset.platform.cuda import device

    # Ray leaves an empty variable in a driver that asked for no GPU, and its workers have GPUs. vLLM takes it as unset.
    elsewhere = choice == "native" and os.environ.get(device.VISIBLE) == "" and stock.finds_gpus()
    return device.missing(elsewhere)


def _why_no_npu() -> str | None:
    from vllm_opset.kernels import ascend

    return ascend.unavailable() or _why_none_is_found("npu")


def _accelerator() -> str | None:
    """The kind of accelerator that this PyTorch was built for, present or not; None for a CPU build."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    return "rocm" if torch.version.hip else accelerator.type  # PyTorch calls AMD's "cuda"


def _why_none_is_found(accelerator: str) -> str | None:
    return None if _is_found(accelerator) else f"PyTorch finds no {accelerator} device"


def _is_found(accelerator: str) -> bool:
    """Whether PyTorch finds such a device here, asked without initialising it."""
    import torch

    return torch.get_device_module("cuda" if accelerator == "rocm" else accelerator).device_count() > 0


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
def _log_once(level: int, message: str) -> None:
    logging.getLogger(f"vllm.{__name__}").log(level, message)
