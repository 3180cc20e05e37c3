"""The references compiled by torch.compile."""

import importlib.util
import shutil
import sys
from collections.abc import Callable

import torch

from vllm_opset.ops.contract import Op

# Each case has a new shape and is compiled for it. At either limit, torch.compile would run the reference eagerly.
torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = sys.maxsize

# Ops whose references read lengths back from the device. A CUDA graph cannot capture that.
READ_BACK = ("paged_attention",)


def unavailable(device: str) -> str | None:
    """Why it is missing: it generates Triton for a GPU and C++ for a CPU."""
    if device == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        return "torch.compile needs a C++ compiler for a CPU"
    if device == "cuda" and not importlib.util.find_spec("triton"):
        return "torch.compile needs Triton for a GPU"
    return None


def any_op(op: Op) -> Callable | None:
    if op.name in READ_BACK:
        return None
    return torch.compile(op.reference, dynamic=False)
