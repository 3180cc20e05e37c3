"""grouped_gemm: the product of each choice's row with the weight of its expert.

Semantics: one of the two products of vLLM's `fused_experts`, over the order of `permute`.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from vllm_opset.ops import _samples
from vllm_opset.ops.contract import Cost, Problem, Sample, accumulator, op
from vllm_opset.ops.gemm.linear import TOLERANCES
from vllm_opset.ops.moe.permute import choices, permute


@op(tolerances=TOLERANCES)
def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[c] = x[c // top_k] weight[e]ᵀ + bias[e] for each choice c of an expert e, summed in fp32 and rounded once.

    x: [rows, in_features], rows dense. Choices are numbered over the rows: row r has the choices r * top_k and the
    next. For rows that are choices themselves, such as those of the second product of experts, top_k is 1.

    weight: [num_experts, out_features, in_features], contiguous. bias: [num_experts, out_features] or None, contiguous.
    All of x's dtype. sorted_token_ids, expert_ids: the results of `permute` for rows * top_k choices.

    Returns a new contiguous tensor [rows * top_k, out_features] of x's dtype. The rows of choices whose block has the
    expert −1 are zero, whatever x holds there. Zero rows are allowed. Raises ValueError if widths or dtypes differ, if
    bias would broadcast, or if sorted_token_ids are no whole blocks.
    """
    block_size = check_arguments(x, weight, sorted_token_ids, expert_ids, top_k, bias)
    num_choices = x.shape[0] * top_k
    wide = accumulator(x)
    # A last row takes the results of empty places.
    out = torch.zeros((num_choices + 1, weight.shape[1]), dtype=wide, device=x.device)
    experts = expert_ids.repeat_interleave(block_size, output_size=len(sorted_token_ids)).unsqueeze(1)
    source = x.to(wide)[(sorted_token_ids.long() // top_k).clamp(max=max(x.shape[0] - 1, 0))]
    for expert in range(len(weight)):
        product = F.linear(source, weight[expert].to(wide), None if bias is None else bias[expert].to(wide))
        out[sorted_token_ids.long()] = torch.where(experts == expert, product, out[sorted_token_ids.long()])
    return out[:num_choices].to(x.dtype).contiguous()


def check_arguments(x, weight, sorted_token_ids, expert_ids, top_k, bias) -> int:
    """The number of choices of a block. Raises ValueError as the contract says."""
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[2] or x.dtype != weight.dtype:
        raise ValueError(f"x {x.dtype} {list(x.shape)} cannot be multiplied by {weight.dtype} {list(weight.shape)}")
    if bias is not None and (bias.shape != weight.shape[:2] or bias.dtype != x.dtype):
        raise ValueError(f"bias must be {x.dtype} {list(weight.shape[:2])}, not {bias.dtype} {list(bias.shape)}")
    if top_k < 1:
        raise ValueError(f"a row cannot have {top_k} choices")
    num_blocks = len(expert_ids)
    if len(sorted_token_ids) % num_blocks if num_blocks else len(sorted_token_ids):
        raise ValueError(f"{len(sorted_token_ids)} sorted_token_ids are no whole blocks of {num_blocks} expert_ids")
    return len(sorted_token_ids) // num_blocks if num_blocks else 1


@grouped_gemm.problem_of
def _(x, *_, **__) -> Problem:
    return Problem(x.device.type, x.dtype)


@grouped_gemm.cost
def _(x, weight, sorted_token_ids, expert_ids, top_k, bias=None) -> Cost:
    """Reads the weights of those experts that have choices, at most one for each choice and each block."""
    rows, (num_experts, outputs, inputs) = x.shape[0] * top_k, weight.shape
    read = min(num_experts, rows, len(expert_ids))
    parameters = read * (outputs * inputs + (0 if bias is None else outputs)) * weight.element_size()
    results = rows * outputs
    return Cost(
        bytes=x.nbytes + parameters + sorted_token_ids.nbytes + expert_ids.nbytes + results * x.element_size(),
        flops=2 * results * inputs,
    )


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
    yield given("all tokens on one expert", [[2]] * 35, 4, 64, 48, bias=True)
    yield given("padded rows", [[1, 0], [-1, -1], [3, 1], [-1, -1]], 4, 64, 48, bias=True)


@grouped_gemm.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name: str, *, inputs=64, bias=None, places=16, top_k=2) -> Sample:
        def make():
            ones = lambda *shape: torch.ones(shape, dtype=dtype, device=device)  # noqa: E731
            sorted_token_ids = torch.zeros(places, dtype=torch.int32, device=device)
            expert_ids = torch.zeros(3, dtype=torch.int32, device=device)
            offset = None if bias is None else ones(*bias)
            return (ones(6, inputs), ones(4, 32, 64), sorted_token_ids, expert_ids, top_k, offset), {}

        return Sample(name, make)

    yield sample("too wide", inputs=72, places=48)
    yield sample("too narrow", inputs=56, places=48)
    yield sample("a bias of one expert", bias=(1, 32), places=48)
    yield sample("a bias of one element", bias=(4, 1), places=48)
    yield sample("no whole blocks", places=50)
    yield sample("no choices of a row", places=48, top_k=0)


@grouped_gemm.bench_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(num_tokens: int, inputs: int, outputs: int, num_experts: int = 128, top_k: int = 8) -> Sample:
        name = f"T{num_tokens} E{num_experts} k{top_k} {inputs} to {outputs}"

        def make():
            ids = choices(name, num_tokens, num_experts, top_k, device)
            return _arguments(name, ids, dtype, device, num_experts, inputs, outputs, block_size=64, on=device)

        return Sample(name, make)

    if device == "cpu":
        yield sample(1, 1024, 512, 32, 4)
        yield sample(64, 1024, 512, 32, 4)
        return
    for num_tokens in _samples.bench_tokens(device):  # Qwen3-30B-A3B
        yield sample(num_tokens, 2048, 1536)
