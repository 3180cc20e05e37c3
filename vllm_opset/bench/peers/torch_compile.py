"""PyTorch's compiler over the references."""

import importlib.util
import shutil
from collections.abc import Callable

import torch

from vllm_opset.ops.contract import Op

# Each case is a shape of its own and is compiled for it; beyond this many the compiler would quietly run eagerly.
torch._dynamo.config.recompile_limit = 1024

# Ops whose references read lengths back from the device, which no CUDA graph can hold.
READ_BACK = ("paged_attention",)


def unavailable(device: str) -> str | None:
    """It generates Triton for a GPU and C++ for a CPU."""
    if device == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        return "torch.compile needs a C++ compiler for a CPU"
    if device == "cuda" and not importlib.util.find_spec("triton"):
        return "torch.compile needs Triton for a GPU"
    return None


def any_op(op: Op) -> Callable | None:
    if op.name in READ_BACK:
        return None
    return torch.compile(op.reference, dynamic=False)
