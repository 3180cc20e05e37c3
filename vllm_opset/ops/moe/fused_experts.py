"""fused_experts: the work of a layer's experts on all tokens, from the chosen experts to the weighted sum.

Semantics: vLLM's `fused_experts`, and `moe_sum` with the shared experts added. It is the composition of `permute`,
`grouped_gemm`, an activation, `grouped_gemm` and `combine`. By some schemes, `quantise` comes before each product.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops.contract import Cost, Problem, Sample, Tolerance, accumulator, op
from vllm_opset.ops.gemm._quantised import BLOCK, TOKEN_BLOCK
from vllm_opset.ops.moe import _experts_draws, _experts_samples, _quantised
from vllm_opset.ops.moe._experts_inputs import experts_arguments
from vllm_opset.ops.moe._fused_experts_arguments import FusedExpertsArguments, takes_arguments
from vllm_opset.ops.moe.permute import ABSENT, choices, places
from vllm_opset.ops.schemes import (
    FP8,
    NONE,
    PER_ROW,
    PER_TENSOR,
    GroupShape,
    Quantised,
    Scheme,
    values_shape,
)

# An intermediate value has half a unit in the last place of error. Each result sums hundreds of them, of both signs, so
# that these errors add up to about one such unit of the results' order, which is 1.
INTERMEDIATES = "both products and the activation are rounded to the dtype; sums of both signs may cancel"
TOLERANCES = {
    torch.float64: Tolerance(1e-12, 1e-12, "fp64 throughout"),
    torch.float32: Tolerance(4e-6, 2e-5, "two products, summed in fp32 in another order"),
    torch.bfloat16: Tolerance(2**-6, 2**-6, INTERMEDIATES),
    torch.float16: Tolerance(2**-9, 2**-9, INTERMEDIATES),
}

PREPARED = ("w1", "w2", "w1_scale", "w2_scale", "w1_zero_point", "w2_zero_point", "out_dtype")


@dataclass(frozen=True)
class FusedExpertsProblem(Problem):
    """dtype: of hidden states and the result. scheme: how the weights and the factors of both products are stored.

    num_experts: of those that are here. intermediate_size: the width of what `w2` multiplies.
    """

    scheme: Scheme = NONE
    num_experts: int = field(kw_only=True)
    hidden_size: int = field(kw_only=True)
    intermediate_size: int = field(kw_only=True)


@op(problem=FusedExpertsProblem, prepared=PREPARED, tolerances=TOLERANCES)
@takes_arguments
def fused_experts(args: FusedExpertsArguments) -> torch.Tensor:
    """y[t] = Σ_k topk_weights[t, k] · expert(e = topk_ids[t, k])(hidden_states[t]) + shared_output[t].

    expert(e)(x) = w2[e] · act(w1[e] · x + w1_bias[e]) + w2_bias[e]. With apply_router_weight_on_input, x is multiplied
    by the weight before, and the result is not.

    `hidden_states`: [num_tokens, hidden_size], rows dense. `w1`: [num_experts, 2 * d, hidden_size] for a gated
    activation. Its gate comes first ("swigluoai": gate and up alternate). Without a gate, it has d rows for an expert.
    `w2`: [num_experts, hidden_size, d]. `w1_bias` and `w2_bias`: a row for each expert, one element for each row of its
    weight. `shared_output`: [num_tokens, hidden_size], the result of shared experts. All have hidden_states' dtype. All
    but hidden_states are contiguous. `topk_weights`: fp32, `topk_ids`: int32, both contiguous [num_tokens, top_k].

    `activation`: a name of vLLM's `MoEActivation`. `swiglu_limit`, `swiglu_alpha`, `swiglu_beta`: its parameters, None
    for the defaults; "silu" with a limit clamps gate and up. `expert_map`: see `permute`. Choices of absent experts and
    ids of −1 add nothing.

    Quantised weights come with `w1_scale` and `w2_scale`, [num_experts, …] of one granularity (see
    `grouped_gemm`). They also come with `out_dtype`, hidden_states' dtype, in which a kernel may prepare the weights.
    Those in int4 may have `w1_zero_point` and `w2_zero_point`, both or none.

    `quant_dtype`: if given, `quantise` quantises x of both products to it. `group_shape`: [1, n], the rows and columns
    of x that share a scale. Or `a1_scale` and `a2_scale`, fp32 [1, 1], are the scales of the two products, and
    `group_shape` is [−1, −1].

    Computed in fp32. A kernel may round the products and the activation to the dtype. Returns a new contiguous tensor
    of hidden_states' shape and dtype. Zero rows are allowed. Raises ValueError for shapes, dtypes, strides or scales
    that do not fit, and for an activation or parameters of it that do not exist. The strides of weights are not
    checked, since a kernel may have prepared them.
    """
    act, parameters = args.check()
    wide = accumulator(args.hidden_states)
    x, weights = args.hidden_states.to(wide), args.topk_weights.to(wide)
    experts = places(args.topk_ids, args.expert_map)
    total = torch.zeros_like(x) if args.shared_output is None else args.shared_output.to(wide)
    for expert in range(len(args.w1)):
        chosen = experts == expert
        weight = torch.where(chosen, weights, 0).sum(dim=1, keepdim=True)
        given = x * weight if args.apply_router_weight_on_input else x
        given = _quantised.as_stored(given, args.quant_dtype, args.group_shape, args.a1_scale)
        own = _quantised.weight_of(args.w1, args.w1_scale, expert, wide, args.w1_zero_point)
        middle = act(F.linear(given, own, _of(args.w1_bias, expert, wide)), **parameters)
        middle = _quantised.as_stored(middle, args.quant_dtype, args.group_shape, args.a2_scale)
        own = _quantised.weight_of(args.w2, args.w2_scale, expert, wide, args.w2_zero_point)
        result = F.linear(middle, own, _of(args.w2_bias, expert, wide))
        result = result if args.apply_router_weight_on_input else result * weight
        total = total + torch.where(chosen.any(dim=1, keepdim=True), result, 0)
    return total.to(args.hidden_states.dtype).contiguous()


def _of(bias: torch.Tensor | None, expert: int, dtype: torch.dtype) -> torch.Tensor | None:
    return None if bias is None else bias[expert].to(dtype)


def check_expert_map(expert_map: torch.Tensor, num_experts: int, name: str = "expert_map") -> None:
    """Raises ValueError if a map names none of the num_experts experts that are here, or others.

    It reads the map, so it is called once, when a layer is built. name: of the tensor, for the message.
    """
    here = expert_map[expert_map != ABSENT]
    if not here.numel():
        raise ValueError(f"{name} names no expert: all of its {expert_map.numel()} entries are {ABSENT}")
    if here.min() < 0 or here.max() >= num_experts:
        raise ValueError(f"{name} names experts from {here.min()} to {here.max()}, and there are {num_experts}")


@fused_experts.problem_of
@takes_arguments
def _(args: FusedExpertsArguments) -> FusedExpertsProblem:
    activation = None if args.quant_dtype is None else Quantised(args.quant_dtype, GroupShape(*args.group_shape))
    scheme = _quantised.scheme_of(args.w1, args.w1_scale, activation, args.w1_zero_point)
    return FusedExpertsProblem(args.hidden_states.device.type, args.hidden_states.dtype, scheme, **sizes_of(args.w2))


def sizes_of(w2: torch.Tensor) -> dict[str, int]:
    """The sizes in the problem of experts with this second weight, which may be packed."""
    return dict(zip(("num_experts", "hidden_size", "intermediate_size"), values_shape(w2), strict=True))


@fused_experts.cost
@takes_arguments
def _(args: FusedExpertsArguments) -> Cost:
    """Reads the weights of those experts that have tokens, and multiplies by them the choices of experts here."""
    chosen = places(args.topk_ids, args.expert_map)
    chosen = chosen[chosen != ABSENT]
    used = chosen.unique().numel()
    of_experts = (
        args.w1, args.w1_bias, args.w1_scale, args.w1_zero_point,
        args.w2, args.w2_bias, args.w2_scale, args.w2_zero_point,
    )  # fmt: skip
    weights = sum(used * part[0].nbytes for part in of_experts if part is not None)
    values = sum(math.prod(values_shape(weight)[1:]) for weight in (args.w1, args.w2))
    given = (args.topk_ids, args.topk_weights, args.shared_output, args.expert_map)
    return Cost(
        bytes=2 * args.hidden_states.nbytes + weights + sum(tensor.nbytes for tensor in given if tensor is not None),
        flops=2 * chosen.numel() * values,
        factors=args.quant_dtype,
    )


@fused_experts.sample_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    return _experts_samples.samples(device, dtype, TOLERANCES[dtype].atol)


@fused_experts.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name: str, hidden=64, ids=(6, 2), weights=(6, 2), to=dtype, layout=lambda x: x, **arguments) -> Sample:
        """layout: of the hidden states, or of what else is given by its shape."""

        def make():
            def ones(*shape: int) -> torch.Tensor:
                return torch.ones(shape, dtype=dtype, device=device)

            tensors = {
                key: layout(ones(*value)) if isinstance(value, tuple) else value for key, value in arguments.items()
            }
            tensors |= {
                key: value.float() for key, value in tensors.items() if key.endswith("_scale") and value is not None
            }
            experts = torch.zeros(ids, dtype=torch.int32, device=device)
            w1, w2 = ones(4, 96, 64).to(to), ones(4, 64, 48).to(to)
            given = {"topk_weights": ones(*weights).float(), "topk_ids": experts} | tensors
            x = ones(6, hidden)
            return (x if tensors else layout(x), w1, w2), given

        return Sample(name, make)

    def zeros(*shape: int, of: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=of, device=device)

    def scaled(name: str, w1_scale=(4, 1, 1), w2_scale=(4, 1, 1), out_dtype=dtype, **arguments) -> Sample:
        return sample(name, to=FP8, w1_scale=w1_scale, w2_scale=w2_scale, out_dtype=out_dtype, **arguments)

    yield sample("too wide", hidden=72)
    yield sample("a bias of one expert", w1_bias=(1, 96))
    yield sample("a bias of one element", w2_bias=(4, 1))
    yield sample("a shared result of one row", shared_output=(1, 64))
    yield sample("hidden states by columns", layout=_samples.column_major)
    yield sample("a shared result by columns", shared_output=(6, 64), layout=_samples.column_major)
    yield sample("a bias in wider rows", w1_bias=(4, 96), layout=_samples.row_view)
    yield sample("experts of one token", ids=(1, 2), weights=(1, 2))
    yield sample("one weight a token", weights=(6, 1))
    yield sample("experts in int64", topk_ids=zeros(6, 2, of=torch.int64))
    yield sample("weights in fp16", topk_weights=zeros(6, 2, of=torch.float16))
    yield sample("experts by columns", topk_ids=zeros(2, 6, of=torch.int32).mT)
    yield sample("weights by columns", topk_weights=zeros(2, 6, of=torch.float32).mT)
    yield sample("an expert map in int64", expert_map=zeros(4, of=torch.int64))
    yield sample("an unknown activation", activation="relu")
    yield sample("no gate where the weight has one", activation="relu2_no_mul")
    yield sample("a parameter that the activation lacks", activation="gelu", swiglu_limit=1.0)
    yield sample("the weights of two experts on one input", apply_router_weight_on_input=True)
    yield scaled("fp8, one weight without scales", w2_scale=None)
    yield scaled("fp8, the scales of one expert", w1_scale=(1, 96, 1))
    yield scaled("fp8, scales for five parts", w2_scale=(4, 5, 1))
    yield scaled("fp8 without the dtype of the result", out_dtype=None)
    yield scaled("fp8 with the zero points of one weight", w1_zero_point=(4, 1, 1))
    yield scaled("fp8 with zero points", w1_zero_point=(4, 1, 1), w2_zero_point=(4, 1, 1))
    yield scaled("fp8 in groups that are missing", quant_dtype=FP8)
    yield scaled("fp8 in groups of two tokens", quant_dtype=FP8, group_shape=[2, 32])
    yield scaled("fp8, one scale for all tokens that is missing", quant_dtype=FP8, group_shape=list(PER_TENSOR))
    yield scaled("fp8, a scale for one of two products", quant_dtype=FP8, group_shape=list(PER_TENSOR), a1_scale=(1, 1))
    yield sample("quantised activations for weights as they are", quant_dtype=FP8, group_shape=list(PER_ROW))


@fused_experts.bench_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(
        num_tokens: int, num_experts: int, top_k: int, hidden_size: int, width: int, fp8: bool = False
    ) -> Sample:
        name = f"T{num_tokens} E{num_experts} k{top_k} H{hidden_size} I{width}"

        def make():
            ids = choices(name, num_tokens, num_experts, top_k, device)
            arguments = experts_arguments(name, ids, device, dtype, num_experts, hidden_size, width, on=device)
            return _quantised.rounded(*arguments, BLOCK, TOKEN_BLOCK, FP8) if fp8 else arguments

        return Sample(f"{name}, fp8 by blocks" if fp8 else name, make)

    for num_tokens in _samples.bench_tokens(device):
        if device == "cpu":  # OLMoE with half of its experts
            yield sample(num_tokens, 32, 8, 2048, 1024)
        else:  # Qwen3-30B-A3B
            yield sample(num_tokens, 128, 8, 2048, 768)
            yield sample(num_tokens, 128, 8, 2048, 768, fp8=True)


fused_experts.random_input(_experts_draws.draw)


def _all_experts(run, x: torch.Tensor) -> torch.Tensor:
    rng = _samples.generator("experts")
    w1, w2 = (_samples.normal(shape, x.dtype, str(x.device), rng, 0.2) for shape in ((4, 64, 64), (4, 64, 32)))
    ids = (torch.arange(len(x), dtype=torch.int32).unsqueeze(1) + torch.arange(2)).remainder(4).int()
    return run(x, w1, w2, torch.ones(ids.shape, device=x.device), ids.to(x.device))


_properties.rows_are_independent(fused_experts, _all_experts)
