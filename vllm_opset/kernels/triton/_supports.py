"""Limits that kernels share, as answers of `supports`: None, or why not."""

from vllm_opset.ops.contract import DTYPES, Problem


def floats(problem: Problem) -> str | None:
    """fp32, bf16 and fp16, accumulated in fp32."""
    if problem.dtype in DTYPES:
        return None
    return f"it computes in fp32, for {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
