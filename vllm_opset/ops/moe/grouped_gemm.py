"""grouped_gemm: the product of each choice's row with the weight of its expert.

Semantics: one of the two products of vLLM's `fused_experts`, over the order of `permute`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vllm_opset.ops import _samples
from vllm_opset.ops._strides import check_contiguous, check_rows
from vllm_opset.ops.contract import Cost, Problem, Sample, accumulator, op
from vllm_opset.ops.gemm._quantised import BLOCK, ROUNDED_FACTORS, TOKEN_BLOCK
from vllm_opset.ops.gemm.linear import TOLERANCES
from vllm_opset.ops.moe import _quantised
from vllm_opset.ops.moe.permute import choices, permute
from vllm_opset.ops.schemes import (
    FP4,
    FP8,
    INT8,
    MXFP4,
    NONE,
    PACKED,
    PER_ROW,
    PER_TENSOR,
    GroupShape,
    Scheme,
    dequantise,
    group_of,
    quantised,
    scales_of,
    stored,
)


@dataclass(frozen=True)
class GroupedGemmProblem(Problem):
    """dtype: of the result. scheme: how the weights and the rows that they multiply are stored."""

    scheme: Scheme = NONE


@op(problem=GroupedGemmProblem, tolerances=TOLERANCES)
def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    weight_zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[c] = x[c // top_k] weight[e]ᵀ + bias[e] for each choice c of an expert e, summed in fp32 and rounded once.

    x: [rows, in_features], rows dense. Choices are numbered over the rows: row r has the choices r * top_k and the
    next. For rows that are choices themselves, such as those of the second product of experts, top_k is 1.

    weight: [num_experts, out_features, in_features], contiguous. bias: [num_experts, out_features] or None, contiguous.
    All of x's dtype. sorted_token_ids, expert_ids: the results of `permute` for rows * top_k choices.

    Quantised weights come with their weight_scale, fp32 [num_experts, …], whose shape says the granularity within an
    expert (see `ops/schemes`), and stand for weight * weight_scale. Those in MXFP4 are bytes, [num_experts,
    out_features, in_features / 2], and so are their scales, [num_experts, out_features, in_features / 32], with any
    strides. Those in int4 are bytes of the same shape, and their scales [num_experts, out_features, groups] are in fp32
    or out_dtype. They may have a weight_zero_point, uint8 of the scales' shape.

    Then out_dtype is the dtype of the bias and the result, and x is of that dtype. Or, by weights that are not packed,
    x is quantised too, with its x_scale as for `linear`, and stands for x * x_scale.

    Returns a new contiguous tensor [rows * top_k, out_features] of the result's dtype. The rows of choices that have no
    place are zero, whatever x holds there. Zero rows are allowed. Raises ValueError if widths, dtypes or strides
    differ, if bias would broadcast, if sorted_token_ids are no whole blocks, for a scale of no granularity, for zero
    points that are not the weights', and for an x_scale where x cannot be quantised.
    """
    block_size = check_arguments(
        x, weight, sorted_token_ids, expert_ids, top_k, bias, weight_scale, x_scale, out_dtype, weight_zero_point
    )
    num_choices = x.shape[0] * top_k
    dtype = out_dtype or x.dtype
    wide = accumulator(x.new_empty(0, dtype=dtype))
    # A last row takes the results of empty places.
    out = torch.zeros((num_choices + 1, weight.shape[1]), dtype=wide, device=x.device)
    experts = expert_ids.repeat_interleave(block_size, output_size=len(sorted_token_ids)).unsqueeze(1)
    source = dequantise(x, x_scale, wide)[(sorted_token_ids.long() // top_k).clamp(max=max(x.shape[0] - 1, 0))]
    for expert in range(len(weight)):
        own = _quantised.weight_of(weight, weight_scale, expert, wide, weight_zero_point)
        product = F.linear(source, own, None if bias is None else bias[expert].to(wide))
        out[sorted_token_ids.long()] = torch.where(experts == expert, product, out[sorted_token_ids.long()])
    return out[:num_choices].to(dtype).contiguous()


def check_arguments(
    x, weight, sorted_token_ids, expert_ids, top_k, bias, weight_scale=None, x_scale=None, out_dtype=None,
    weight_zero_point=None,
) -> int:  # fmt: skip
    """The number of choices of a block. Raises ValueError as the contract says."""
    dtype = out_dtype or x.dtype
    if x.ndim != 2 or weight.ndim != 3 or (x_scale is None and x.dtype != dtype):
        raise ValueError(f"x {x.dtype} {list(x.shape)} cannot be multiplied by {weight.dtype} {list(weight.shape)}")
    if weight_scale is not None and out_dtype is None:
        raise ValueError("quantised weights need out_dtype")
    if x_scale is not None:
        if weight_scale is None or weight.dtype is PACKED:
            raise ValueError("x with an x_scale needs quantised weights that are not packed")
        group_of(x.shape, x_scale.shape)
    _quantised.check_weight("weight", weight, weight_scale, (*weight.shape[:2], x.shape[1]), dtype, weight_zero_point)
    if bias is not None and (bias.shape != weight.shape[:2] or bias.dtype != dtype):
        raise ValueError(f"bias must be {dtype} {list(weight.shape[:2])}, not {bias.dtype} {list(bias.shape)}")
    check_rows("x", x)
    check_contiguous(weight=weight, bias=bias, sorted_token_ids=sorted_token_ids, expert_ids=expert_ids)
    if top_k < 1:
        raise ValueError(f"a row cannot have {top_k} choices")
    num_blocks = len(expert_ids)
    if len(sorted_token_ids) % num_blocks if num_blocks else len(sorted_token_ids):
        raise ValueError(f"{len(sorted_token_ids)} sorted_token_ids are no whole blocks of {num_blocks} expert_ids")
    return len(sorted_token_ids) // num_blocks if num_blocks else 1


@grouped_gemm.problem_of
def _(
    x, weight, sorted_token_ids, expert_ids, top_k, bias=None, weight_scale=None, x_scale=None, out_dtype=None,
    weight_zero_point=None,
) -> GroupedGemmProblem:  # fmt: skip
    scheme = _quantised.scheme_of(weight, weight_scale, quantised(x, x_scale), weight_zero_point)
    return GroupedGemmProblem(x.device.type, out_dtype or x.dtype, scheme)


@grouped_gemm.cost
def _(
    x, weight, sorted_token_ids, expert_ids, top_k, bias=None, weight_scale=None, x_scale=None, out_dtype=None,
    weight_zero_point=None,
) -> Cost:  # fmt: skip
    """Reads the weights of those experts that have choices, and multiplies by them the choices that have a place."""
    num_choices, inputs, outputs = x.shape[0] * top_k, x.shape[1], weight.shape[1]
    placed = int((sorted_token_ids < num_choices).sum())
    read = expert_ids[expert_ids >= 0].unique().numel()
    of_experts = (weight, weight_scale, bias, weight_zero_point)
    parameters = sum(read * part[0].nbytes for part in of_experts if part is not None)
    others = sum(part.nbytes for part in (x, x_scale, sorted_token_ids, expert_ids) if part is not None)
    result_bytes = num_choices * outputs * (out_dtype or x.dtype).itemsize
    factors = None if x_scale is None else x.dtype
    return Cost(bytes=parameters + others + result_bytes, flops=2 * placed * outputs * inputs, factors=factors)


def _arguments(
    name, ids, dtype, device, num_experts, inputs, outputs, *, block_size=16, rows_of=None, bias=False, on="cpu"
):
    """rows_of: the choices of a row of x, by default as many as a token has."""
    rng = _samples.generator(name, on)
    top_k = ids.shape[1] if rows_of is None else rows_of
    x = _samples.normal((ids.numel() // top_k, inputs), dtype, device, rng)
    weight = _samples.normal((num_experts, outputs, inputs), dtype, device, rng, std=inputs**-0.5)
    offset = _samples.normal((num_experts, outputs), dtype, device, rng) if bias else None
    # The weights of experts without tokens, and of choices that are left out, must not be seen in the result.
    weight[sorted(set(range(num_experts)) - set(ids.flatten().tolist()))] = torch.nan
    x[(ids < 0).view(len(x), top_k).all(dim=1)] = torch.nan
    return (x, weight, *permute(ids, num_experts, block_size), top_k, offset), {}


@grouped_gemm.sample_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name: str, num_tokens: int, num_experts: int, top_k: int, *shape: int, **how) -> Sample:
        def make():
            ids = choices(name, num_tokens, num_experts, top_k, device)
            return _arguments(name, ids, dtype, device, num_experts, *shape, **how)

        return Sample(name, make)

    def given(name: str, ids: list[list[int]], num_experts: int, *shape: int, **how) -> Sample:
        def make():
            tensor = torch.tensor(ids, dtype=torch.int32, device=device)
            return _arguments(name, tensor, dtype, device, num_experts, *shape, **how)

        return Sample(name, make)

    yield sample("zero tokens", 0, 4, 2, 32, 48)
    yield sample("one token", 1, 4, 2, 64, 48)
    yield sample("one token, bias", 1, 4, 2, 64, 48, bias=True)
    yield sample("a row for each choice", 9, 4, 2, 64, 48, rows_of=1, bias=True)
    yield sample("16 tokens", 16, 8, 2, 96, 64)
    yield sample("80 tokens, bias", 80, 8, 2, 64, 96, bias=True, block_size=64)
    yield sample("many experts", 6, 60, 4, 64, 32)
    yield sample("k = number of experts", 5, 4, 4, 64, 32)
    yield sample("odd features", 7, 4, 2, 77, 33, bias=True)
    yield sample("long sums", 5, 4, 2, 2048, 33)
    yield sample("blocks of 32", 40, 4, 1, 64, 40, block_size=32)
    yield sample("blocks of 128", 150, 2, 1, 64, 40, block_size=128)
    yield sample("blocks of three tiles", 150, 2, 1, 64, 40, block_size=300, bias=True)
    # A tile of a small weight takes less shared memory than those of models' weights.
    yield sample("whole tiles", 20, 2, 1, 1024, 160)
    yield sample("whole tiles, blocks of 128", 150, 2, 1, 512, 300, block_size=128)
    yield given("all tokens on one expert", [[2]] * 35, 4, 64, 48, bias=True)
    yield given("padded rows", [[1, 0], [-1, -1], [3, 1], [-1, -1]], 4, 64, 48, bias=True)
    yield from _quantised_samples(device, dtype)


def _rounded(arguments: tuple, group: GroupShape, x_group: GroupShape | None, to: torch.dtype):
    """Arguments of grouped_gemm, with weights in the dtype `to`, and x too where it has groups."""
    x, weight, *others = arguments
    weight, scale = _quantised.rounded_experts(weight.float(), group, to)
    how, x_scale = {"weight_scale": scale, "out_dtype": x.dtype}, None
    if x_group is not None:
        x_scale = scales_of(x.nan_to_num(), to, x_group)
        x = stored(x, x_scale, to)
    return (x, weight, *others), how | {"x_scale": x_scale}


def _quantised_samples(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(
        name, num_tokens, num_experts, top_k, inputs, outputs, group, x_group=None, to=FP8, by_columns=False, **how
    ) -> Sample:
        def make():
            ids = choices(name, num_tokens, num_experts, top_k, device)
            ids[1:2] = -1
            arguments, _ = _arguments(name, ids, dtype, device, num_experts, inputs, outputs, **how)
            arguments, scales = _rounded(arguments, group, x_group, to)
            if by_columns:
                scales["weight_scale"] = scales["weight_scale"].mT.contiguous().mT
            return arguments, scales

        return Sample(name, make, ROUNDED_FACTORS)

    def int4(
        name, num_tokens, num_experts, top_k, inputs, outputs, group, zero_point=False, by_columns=False, **how
    ) -> Sample:
        def make():
            ids = choices(name, num_tokens, num_experts, top_k, device)
            ids[1:2] = -1
            (x, weight, *others), _ = _arguments(name, ids, dtype, device, num_experts, inputs, outputs, **how)
            weight, scale, zeros = _quantised.int4_experts(weight, group, zero_point, _samples.generator(name))
            if by_columns:
                scale = _samples.column_major(scale)
            return (x, weight, *others), {"weight_scale": scale, "out_dtype": dtype, "weight_zero_point": zeros}

        return Sample(name, make, ROUNDED_FACTORS)

    yield sample("fp8, zero tokens", 0, 4, 2, 64, 48, PER_ROW, PER_ROW)
    yield sample("fp8 weight per tensor", 5, 4, 2, 96, 48, PER_TENSOR)
    yield sample("fp8 weight per channel, bias", 5, 4, 2, 96, 48, PER_ROW, bias=True)
    yield sample("fp8 weight by blocks", 5, 4, 2, 256, 192, BLOCK)
    yield sample("fp8 weight by incomplete blocks, bias", 40, 2, 1, 200, 150, BLOCK, bias=True, block_size=32)
    yield sample("fp8 per tensor", 5, 4, 2, 96, 48, PER_TENSOR, PER_TENSOR, bias=True)
    yield sample("fp8 per channel and token", 17, 4, 2, 160, 80, PER_ROW, PER_ROW)
    yield sample("fp8 per channel and token, odd features", 7, 4, 2, 77, 33, PER_ROW, PER_ROW, bias=True)
    yield sample("fp8 per channel and token, 16 features", 7, 4, 2, 16, 33, PER_ROW, PER_ROW)
    yield sample("fp8 by blocks, one token", 1, 8, 4, 384, 256, BLOCK, TOKEN_BLOCK)
    yield sample("fp8 by blocks", 150, 2, 1, 384, 256, BLOCK, TOKEN_BLOCK, block_size=128)
    yield sample("fp8 by incomplete blocks, bias", 5, 4, 2, 200, 150, BLOCK, TOKEN_BLOCK, bias=True)
    yield sample("fp8 by smaller blocks", 5, 4, 2, 192, 96, GroupShape(32, 32), GroupShape(1, 32))
    yield sample("int8 per channel and token", 17, 4, 2, 160, 80, PER_ROW, PER_ROW, INT8)
    yield sample("int8 weight per channel", 5, 4, 2, 96, 48, PER_ROW, None, INT8)
    yield sample("mxfp4 weight", 5, 4, 2, 96, 48, MXFP4.group, None, FP4)
    yield sample("mxfp4 weight, one token, bias", 1, 8, 4, 288, 96, MXFP4.group, None, FP4, bias=True)
    yield sample("mxfp4 weight, scales by columns", 9, 8, 4, 288, 96, MXFP4.group, None, FP4, by_columns=True)
    yield sample("mxfp4 weight, one block", 3, 4, 2, 32, 33, MXFP4.group, None, FP4)
    yield sample("mxfp4 weight, bias", 90, 2, 1, 320, 80, MXFP4.group, None, FP4, bias=True, block_size=64)
    yield int4("int4 weight, zero tokens", 0, 4, 2, 64, 48, 32)
    yield int4("int4 weight, one token, bias", 1, 8, 4, 288, 80, 32, bias=True)
    yield int4("int4 weight, zero points", 17, 4, 2, 256, 48, 128, zero_point=True)
    yield int4("int4 weight, scales by columns, zero points", 5, 4, 2, 192, 48, 64, zero_point=True, by_columns=True)
    yield int4("int4 weight per row, zero points, bias", 5, 4, 2, 96, 33, 96, zero_point=True, bias=True)
    yield int4("int4 weight, the last group is incomplete", 90, 2, 1, 160, 80, 64, zero_point=True, block_size=64)
    # Kernels may have larger tiles for large blocks, and leave out the empty half of one.
    yield sample("mxfp4 weight, blocks of 256", 300, 2, 1, 96, 144, MXFP4.group, None, FP4, block_size=256)
    yield int4("int4 weight, blocks of 256, bias", 300, 2, 1, 256, 144, 128, bias=True, block_size=256)


@grouped_gemm.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(
        name: str, *, inputs=64, bias=None, places=48, top_k=2, weight_scale=None, x_scale=None, to=FP8, zeros=None,
        layout=lambda tensor: tensor, **how,
    ) -> Sample:  # fmt: skip
        """to: what weights with scales are stored in. The scales of bytes are bytes too, unless there are zero points.

        zeros: the shape of zero points. layout: of x and the bias.
        """

        def make():
            ones = lambda *shape: torch.ones(shape, dtype=dtype, device=device)  # noqa: E731
            x, weight, offset = ones(6, inputs), ones(4, 32, 64), None if bias is None else ones(*bias)
            scales = {}
            if weight_scale is not None:
                scale_dtype = to if to is torch.uint8 and zeros is None else torch.float32
                weight, scales = weight.to(to), {"weight_scale": ones(*weight_scale).to(scale_dtype)}
                scales["out_dtype"] = dtype
            if x_scale is not None:
                x, scales["x_scale"] = x.to(x.dtype if weight_scale is None else FP8), ones(*x_scale).float()
            if zeros is not None:
                scales["weight_zero_point"] = ones(*zeros).byte()
            sorted_token_ids = torch.zeros(places, dtype=torch.int32, device=device)
            expert_ids = torch.zeros(3, dtype=torch.int32, device=device)
            offset = None if offset is None else layout(offset)
            return (layout(x) if bias is None else x, weight, sorted_token_ids, expert_ids, top_k, offset), scales | how

        return Sample(name, make)

    yield sample("too wide", inputs=72)
    yield sample("too narrow", inputs=56)
    yield sample("a bias of one expert", bias=(1, 32))
    yield sample("a bias of one element", bias=(4, 1))
    yield sample("x by columns", layout=_samples.column_major)
    yield sample("a bias in wider rows", bias=(4, 32), layout=_samples.row_view)
    yield sample("no whole blocks", places=50)
    yield sample("no choices of a row", top_k=0)
    yield sample("fp8, the scales of one expert", weight_scale=(1, 32, 1))
    yield sample("fp8, a matrix of scales", weight_scale=(4, 32))
    yield sample("fp8, a scale for each of five parts", weight_scale=(4, 5, 1))
    yield sample("fp8, a scale for another number of rows", weight_scale=(4, 1, 1), x_scale=(5, 1))
    yield sample("fp8 without the dtype of the result", weight_scale=(4, 1, 1), out_dtype=None)
    yield sample("a scale of x alone", x_scale=(6, 1))
    yield sample("mxfp4, a scale for 64 values", inputs=128, weight_scale=(4, 32, 2), to=torch.uint8)
    packed = {"inputs": 128, "to": torch.uint8, "weight_scale": (4, 32, 2)}
    yield sample("int4, zero points of another granularity", **packed, zeros=(4, 32, 1))
    yield sample("int4, the zero points of one expert", **packed, zeros=(1, 32, 2))
    yield sample("fp8 with zero points", weight_scale=(4, 32, 1), zeros=(4, 32, 1))
    yield sample("zero points without scales", zeros=(4, 32, 1))
    yield sample("mxfp4, as many bytes as values", weight_scale=(4, 32, 4), to=torch.uint8)


@grouped_gemm.bench_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(
        num_tokens: int, inputs: int, outputs: int, num_experts: int = 128, top_k: int = 8, fp8: bool = False
    ) -> Sample:
        name = f"T{num_tokens} E{num_experts} k{top_k} {inputs} to {outputs}"

        def make():
            ids = choices(name, num_tokens, num_experts, top_k, device)
            arguments = _arguments(name, ids, dtype, device, num_experts, inputs, outputs, block_size=64, on=device)
            return _rounded(arguments[0], BLOCK, TOKEN_BLOCK, FP8) if fp8 else arguments

        return Sample(f"{name}, fp8 by blocks" if fp8 else name, make)

    if device == "cpu":
        yield sample(1, 1024, 512, 32, 4)
        yield sample(64, 1024, 512, 32, 4)
        return
    for num_tokens in _samples.bench_tokens(device):  # Qwen3-30B-A3B
        yield sample(num_tokens, 2048, 1536)
        yield sample(num_tokens, 2048, 1536, fp8=True)
