"""DeepGEMM as vLLM calls it, from a package of its own or a stock vLLM wheel. It compiles a kernel for each shape."""

import functools
import importlib
import importlib.util
import os
import shutil
from pathlib import Path

import torch

from vllm_opset.ops.gemm._quantised import BLOCK, TOKEN_BLOCK
from vllm_opset.ops.schemes import FP8

HOPPER = 9  # the major compute capability on which scales may be fp32
MODULE = "vllm.utils.deep_gemm"
# What vLLM requires of the outputs and of the inputs (`should_use_deepgemm_for_fp8_linear`).
OUTPUTS, INPUTS = 64, 128


def unavailable(device: str) -> str | None:
    """Why it is missing: it is for NVIDIA GPUs, and needs nvcc."""
    if device != "cuda" or torch.cuda.get_device_capability()[0] != HOPPER:
        return "DeepGEMM multiplies by fp32 scales on Hopper GPUs"
    if not importlib.util.find_spec("vllm"):
        return "vLLM, which it is called through, is not installed"
    if not _module().is_deep_gemm_supported():
        return "this vLLM has no DeepGEMM, or VLLM_USE_DEEP_GEMM=0 turns it off"
    return None if _can_compile() else "DeepGEMM needs nvcc to compile its kernels"


def prepare_linear(x, weight, bias=None, weight_scale=None, x_scale=None, out_dtype=None, weight_zero_point=None):
    """The scales of x in the layout in which vLLM's quantisation writes them for DeepGEMM."""
    if x_scale is None or weight.dtype is not FP8 or out_dtype is not torch.bfloat16:
        raise NotImplementedError("DeepGEMM is set up here for fp8 by fp8, with results in bf16")
    if weight_scale.shape != BLOCK.scale_shape(weight.shape) or x_scale.shape != TOKEN_BLOCK.scale_shape(x.shape):
        raise NotImplementedError("DeepGEMM has scales by blocks of 128")
    if bias is not None or weight.shape[0] % OUTPUTS or weight.shape[1] % INPUTS:
        raise NotImplementedError(f"DeepGEMM has no bias, and multiples of {OUTPUTS} outputs and {INPUTS} inputs")
    return (x, weight, None, weight_scale, _module().get_col_major_tma_aligned_tensor(x_scale), out_dtype), {}


def linear(x, weight, bias=None, weight_scale=None, x_scale=None, out_dtype=None, weight_zero_point=None):
    out = torch.empty((len(x), len(weight)), dtype=out_dtype, device=x.device)
    _module().fp8_gemm_nt((x, x_scale), (weight, weight_scale), out, is_deep_gemm_e8m0_used=False)
    return out


def _can_compile() -> bool:
    folders = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    found = shutil.which("nvcc") or any(Path(folder, "bin/nvcc").exists() for folder in folders if folder)
    return bool(found) or os.environ.get("DG_JIT_USE_NVRTC") == "1"


@functools.cache
def _module():
    return importlib.import_module(MODULE)
