"""rms_norm_quant: root-mean-square normalisation, whose result is quantised in the same pass.

Semantics: vLLM's `rms_norm_dynamic_per_token_quant`, `rms_norm_per_block_quant` and `rms_norm_static_fp8_quant`, which
the granularity of the scales tells apart. vLLM rounds before it multiplies by the weight. This op rounds the norm once.
"""

from dataclasses import dataclass

import torch

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops.contract import op
from vllm_opset.ops.norm.rms_norm import check_parameter, rms_norm
from vllm_opset.ops.quantisation import _fused
from vllm_opset.ops.quantisation.quantise import QuantiseProblem
from vllm_opset.ops.schemes import FP8, PER_ROW, GroupShape


@dataclass(frozen=True)
class RMSNormQuantProblem(QuantiseProblem):
    """columns: size of the normalised dimension. weight_dtype: None without a weight."""

    weight_dtype: torch.dtype | None


@op(problem=RMSNormQuantProblem, mutates=("out",), tolerances=_fused.TOLERANCES)
def rms_norm_quant(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    to_dtype: torch.dtype,
    group_shape: list[int],
    scale: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantise(rms_norm(x, weight, epsilon, weight_offset), to_dtype, group_shape, scale)

    x: [rows, hidden_size], any strides. weight, epsilon, weight_offset: as `rms_norm`.

    to_dtype: torch.float8_e4m3fn or torch.int8. group_shape: [1, −1] for scales of rows, or [1, n] for scales of n
    values of a row, where n is a power of two. They are found as `quantise` finds them. [−1, −1] takes the given scale,
    [1, 1].

    out: of x's shape and dtype, any strides, to which the norm is also written, or None. It may be x.

    Returns new contiguous tensors: [rows, hidden_size] of to_dtype, and fp32 scales. Zero rows are allowed. A group
    with NaN may become any values.
    Raises ValueError if x is no matrix, or for another weight, dtype, group, scale or out.
    """
    check_arguments(x, weight, to_dtype, group_shape, scale, out)
    return _fused.quantised(rms_norm(x, weight, epsilon, weight_offset), to_dtype, group_shape, scale, out)


def check_arguments(x, weight, to_dtype, group_shape, scale, out) -> None:
    check_parameter(weight, x)
    _fused.check_arguments(x, x.shape[-1], to_dtype, group_shape, scale, out)


def problem_for(x, weight, to_dtype, group_shape, scale) -> RMSNormQuantProblem:
    group, weight_dtype = GroupShape(*group_shape), None if weight is None else weight.dtype
    return RMSNormQuantProblem(x.device.type, x.dtype, to_dtype, group, scale is not None, x.shape[-1], weight_dtype)


@rms_norm_quant.problem_of
def _(x, weight, epsilon, to_dtype, group_shape, scale=None, weight_offset=0.0, out=None) -> RMSNormQuantProblem:
    return problem_for(x, weight, to_dtype, group_shape, scale)


def x_and_weight(shape, dtype, device, rng, std, layout, weight_dtype: torch.dtype | str | None = "of x") -> tuple:
    x = layout(_samples.normal(shape, dtype, device, rng, std))
    weight_dtype = dtype if weight_dtype == "of x" else weight_dtype
    return x, None if weight_dtype is None else _samples.normal(shape[-1:], weight_dtype, device, rng)


WEIGHTS = (
    _fused.Case("no weight", (4, 64), others={"weight_dtype": None}),
    _fused.Case("fp32 weight", (4, 256), others={"weight_dtype": torch.float32}),
)


_fused.complete(
    rms_norm_quant,
    lambda *args, **others: (*x_and_weight(*args, **others), 1e-6),
    flops_per_element=7,
    bench_columns=(4096, 8192),
    further=WEIGHTS,
)


@rms_norm_quant.property_
def weights_are_offset(run, device: str, dtype: torch.dtype) -> None:
    """Gemma's weights are stored less 1."""
    x, weight = x_and_weight((4, 64), dtype, device, _samples.generator("offset"), 1.0, lambda x: x)
    weight = (weight.float() * 4).round() / 4  # so that adding 1 is exact
    got = run(x, weight.to(dtype), 1e-6, FP8, list(PER_ROW), weight_offset=1.0)
    want = run(x, (weight + 1).to(dtype), 1e-6, FP8, list(PER_ROW))
    _properties.equal("the offset is not added", got[0].float(), want[0].float())


_properties.rows_are_independent(
    rms_norm_quant, lambda run, x: run(x, x[0].contiguous(), 1e-6, FP8, list(PER_ROW))[0].float()
)
