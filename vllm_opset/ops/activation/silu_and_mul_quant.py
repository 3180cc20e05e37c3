"""silu_and_mul_quant: the gated activation of most models, whose result is quantised in the same pass.

Semantics: `silu_and_mul`, then `quantise`. vLLM's are `silu_and_mul_quant`, which takes a given scale, and
`silu_and_mul_per_block_quant`.
"""

import torch

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops.activation import _gated
from vllm_opset.ops.activation.silu_and_mul import silu_and_mul
from vllm_opset.ops.contract import op
from vllm_opset.ops.quantisation import _fused
from vllm_opset.ops.quantisation.quantise import QuantiseProblem
from vllm_opset.ops.schemes import FP8, PER_ROW, PER_TENSOR, GroupShape


@op(problem=QuantiseProblem, mutates=("out",), tolerances=_fused.TOLERANCES)
def silu_and_mul_quant(
    x: torch.Tensor,
    to_dtype: torch.dtype,
    group_shape: list[int],
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantise(silu_and_mul(x), to_dtype, group_shape, scale)

    x: [rows, 2 * d], any strides. to_dtype, group_shape, scale: as `rms_norm_quant`. out: [rows, d] of x's dtype, any
    strides, to which the unquantised result is also written, or None.

    Returns new contiguous tensors: [rows, d] of to_dtype, and fp32 scales. Zero rows are allowed. A group with NaN may
    become any values.
    Raises ValueError if x is no matrix or has an odd number of columns, or for another dtype, group, scale or out.
    """
    check_arguments(x, to_dtype, group_shape, scale, out)
    return _fused.quantised(silu_and_mul(x), to_dtype, group_shape, scale, out)


def check_arguments(x, to_dtype, group_shape, scale, out) -> None:
    _gated.check_width(x)
    _fused.check_arguments(x, x.shape[-1] // 2, to_dtype, group_shape, scale, out)


@silu_and_mul_quant.problem_of
def _(x, to_dtype, group_shape, scale=None, out=None) -> QuantiseProblem:
    """columns: of the result."""
    group = GroupShape(*group_shape)
    return QuantiseProblem(x.device.type, x.dtype, to_dtype, group, scale is not None, x.shape[-1] // 2)


def _example(shape, dtype, device, rng, std, layout) -> tuple:
    return (layout(_samples.normal((shape[0], 2 * shape[1]), dtype, device, rng, std)),)


LARGE_ROWS = (
    _fused.Case("large rows by blocks", (2, 1200), _fused.PER_BLOCK),
    _fused.Case("large rows with a given scale", (2, 1200), PER_TENSOR),
)


_fused.complete(silu_and_mul_quant, _example, flops_per_element=8, bench_columns=(12288,), further=LARGE_ROWS)
_properties.rows_are_independent(silu_and_mul_quant, lambda run, x: run(x, FP8, list(PER_ROW))[0].float())
