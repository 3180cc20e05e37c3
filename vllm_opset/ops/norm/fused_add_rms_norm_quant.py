"""fused_add_rms_norm_quant: adds to the residual stream, normalises the sum and quantises the result, in one pass.

Semantics: `fused_add_rms_norm`, then `quantise`. vLLM's are `fused_add_rms_norm_static_fp8_quant`, and
`rms_norm_dynamic_per_token_quant` and `rms_norm_per_block_quant` with a residual.
"""

import torch

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops.contract import accumulator, op
from vllm_opset.ops.norm import fused_add_rms_norm as unquantised
from vllm_opset.ops.norm.rms_norm import rms_norm
from vllm_opset.ops.norm.rms_norm_quant import WEIGHTS, RMSNormQuantProblem, problem_for, x_and_weight
from vllm_opset.ops.quantisation import _fused
from vllm_opset.ops.schemes import FP8, PER_ROW


@op(problem=RMSNormQuantProblem, mutates=("residual", "out"), tolerances=_fused.TOLERANCES)
def fused_add_rms_norm_quant(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    to_dtype: torch.dtype,
    group_shape: list[int],
    scale: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual <- x + residual; returns quantise(rms_norm(x + residual, …), to_dtype, group_shape, scale).

    The sum is formed in fp32. The residual stores it rounded to its dtype; the norm uses it unrounded.

    x, residual: [rows, hidden_size], of one shape and dtype, any strides. x stays as it is, unless it is out.
    All else is as in `rms_norm_quant`.
    Raises ValueError if x and the residual differ in shape or dtype, and where `rms_norm_quant` does.
    """
    check_arguments(x, residual, weight, to_dtype, group_shape, scale, out)
    total = x.to(accumulator(x)) + residual
    residual.copy_(total)
    return _fused.quantised(
        rms_norm(total, weight, epsilon, weight_offset).to(x.dtype), to_dtype, group_shape, scale, out
    )


def check_arguments(x, residual, weight, to_dtype, group_shape, scale, out) -> None:
    unquantised.check_arguments(x, residual, weight)
    _fused.check_arguments(x, x.shape[-1], to_dtype, group_shape, scale, out)


@fused_add_rms_norm_quant.problem_of
def _(x, residual, weight, epsilon, to_dtype, group_shape, scale=None, weight_offset=0.0, out=None):
    return problem_for(x, weight, to_dtype, group_shape, scale)


def _example(shape, dtype, device, rng, std, layout, **others) -> tuple:
    x, weight = x_and_weight(shape, dtype, device, rng, std, layout, **others)
    return x, layout(_samples.normal(shape, dtype, device, rng, std)), weight, 1e-6


_fused.complete(fused_add_rms_norm_quant, _example, flops_per_element=8, bench_columns=(4096, 8192), further=WEIGHTS)


@fused_add_rms_norm_quant.property_
def results_may_replace_x(run, device: str, dtype: torch.dtype) -> None:
    """With x as out, values, scales and residual are the same, and x is the norm."""
    x, residual, weight, epsilon = _example((5, 96), dtype, device, _samples.generator("x"), 1.0, lambda x: x)
    other, out = residual.clone(), torch.empty_like(x)
    want = run(x, other, weight, epsilon, FP8, list(PER_ROW), out=out)
    got = run(x, residual, weight, epsilon, FP8, list(PER_ROW), out=x)
    for what, have, wanted in (("norm", x, out), ("residual", residual, other), ("scale", got[1], want[1])):
        _properties.equal(f"the {what} is another", have, wanted)
    _properties.equal("the values are others", got[0].float(), want[0].float())


_properties.rows_are_independent(
    fused_add_rms_norm_quant, lambda run, x: run(x, x.clone(), None, 1e-6, FP8, list(PER_ROW))[0].float()
)
