"""vLLM's compiled CUDA ops (`torch.ops._C`), from a stock vLLM wheel."""

import importlib
import importlib.util

import torch

LIBRARIES = ("vllm._C", "vllm._C_stable_libtorch")  # which of them exist depends on the release


def unavailable(device: str) -> str | None:
    """They are CUDA kernels, and only in a wheel that was built with them."""
    if device != "cuda":
        return "vLLM's compiled ops are CUDA kernels"
    if not importlib.util.find_spec("vllm"):
        return "vLLM is not installed"
    for library in LIBRARIES:
        if importlib.util.find_spec(library):
            importlib.import_module(library)
    return None if hasattr(torch.ops._C, "rms_norm") else "this vLLM was built without compiled ops"


def rms_norm(x, weight, epsilon, weight_offset=0.0):
    _refuse(weight_offset, "weight_offset")
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


def fused_add_rms_norm(x, residual, weight, epsilon, weight_offset=0.0):
    _refuse(weight_offset, "weight_offset")
    torch.ops._C.fused_add_rms_norm(x, residual, weight, epsilon)


def silu_and_mul(x):
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    torch.ops._C.silu_and_mul(out, x)
    return out


def _refuse(value, name: str) -> None:
    if value:
        raise NotImplementedError(f"it has no {name}")
