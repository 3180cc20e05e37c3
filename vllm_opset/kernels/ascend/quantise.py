"""quantise by npu_dynamic_quant, to int8 with a scale for each row.

Source: its docs: scale = max |x| / 127 of a row, and round(x / scale); fp16 and bf16, symmetric, by the default of
quant_mode. For a row of zeros this divides zero by zero. So its scale becomes the contract's smallest one, with which
any int8 values stand for less than 1e-10. Not documented: how ties are rounded. The contract's tolerance allows both.
"""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.ascend import _constraints
from vllm_opset.kernels.ascend._operators import npu
from vllm_opset.ops.quantisation.quantise import QuantiseProblem, check_arguments
from vllm_opset.ops.schemes import INT8, PER_ROW, SMALLEST_SCALES, Quantised


def supports(problem: QuantiseProblem) -> str | None:
    """bf16 and fp16 on A2 and A3, to int8 with a scale for each row that the values give."""
    wanted = Quantised(problem.to_dtype, problem.group)
    if wanted != Quantised(INT8, PER_ROW) or problem.static:
        return f"npu_dynamic_quant computes scales for int8 per row, not {'given ones for ' * problem.static}{wanted}"
    return _constraints.refused("npu_dynamic_quant", problem)


@kernel(ops.quantise, name="ascend", supports=supports)
def quantise(
    x: torch.Tensor, to_dtype: torch.dtype, group_shape: list[int], scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    check_arguments(x.shape, to_dtype, group_shape, scale)
    if not len(x):
        return x.new_empty(x.shape, dtype=to_dtype), x.new_empty((0, 1), dtype=torch.float32)
    values, scales = npu.npu_dynamic_quant(x.contiguous())
    return values, scales.unsqueeze(1).clamp(min=SMALLEST_SCALES[INT8])
