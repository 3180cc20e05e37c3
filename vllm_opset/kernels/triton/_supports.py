"""Limits that kernels share, as answers of `supports`: None, or the reason why not."""

import torch

from vllm_opset.kernels.triton import launched_for
from vllm_opset.ops.contract import DTYPES, Problem
from vllm_opset.targets import FP8


def floats(problem: Problem) -> str | None:
    """fp32, bf16 and fp16, accumulated in fp32."""
    return None if problem.dtype in DTYPES else f"it computes in fp32, for {_names(DTYPES)}"


def kv_cache(problem: Problem) -> str | None:
    """fp32, bf16 and fp16, accumulated in fp32; a KV cache of these or, from compute capability 8.9 on, of fp8 e4m3."""
    if problem.kv_cache_dtype == torch.float8_e4m3fn:
        target = launched_for(problem.target)
        return floats(problem) if FP8 in target.features else f"{target} does not convert fp8 e4m3"
    if problem.kv_cache_dtype not in DTYPES:
        return f"the KV cache must be of {_names((*DTYPES, torch.float8_e4m3fn))}, not {problem.kv_cache_dtype}"
    return floats(problem)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
