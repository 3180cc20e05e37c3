"""rms_norm_gated: RMS norm of a row or of groups of its elements, with a gate before or after it.

Semantics: vLLM's `RMSNormGated.forward_native`, which computes in fp32 as well. Mamba 2 and gated delta nets use it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops.contract import Cost, Problem, Sample, accumulator, op
from vllm_opset.ops.norm.rms_norm import check_parameter

SILU = ("silu", "swish")  # two words for it
ACTIVATIONS = (*SILU, "sigmoid")


@dataclass(frozen=True)
class RMSNormGatedProblem(Problem):
    """hidden_size: elements of a row. group_size: of a group. weight_dtype: of the weight."""

    hidden_size: int
    group_size: int
    weight_dtype: torch.dtype


@op(problem=RMSNormGatedProblem)
def rms_norm_gated(
    x: torch.Tensor,
    z: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: str = "swish",
) -> torch.Tensor:
    """norm(x · act(z)), or norm(x) · act(z) if norm_before_gate, in fp32 and rounded once.

    norm(x) = x / sqrt(mean(x²) + epsilon) · weight, where the mean is that of a group: group_size consecutive elements
    of a row, or all of them for None. activation: "sigmoid" for act(z) = σ(z), "silu" or "swish" for z · σ(z).

    x, z: [..., hidden_size], of one dtype, any strides. Without z there is no gate. weight: [hidden_size], contiguous,
    of x's dtype or fp32. Returns a new contiguous tensor of x's shape and dtype. Zero rows are allowed. Raises
    ValueError if shapes disagree, hidden_size is no multiple of group_size, or `activation` is another word.
    """
    groups = check_arguments(x, z, weight, group_size, activation)
    dtype = accumulator(x)
    y = x.to(dtype)
    gate = None if z is None else (F.silu(z.to(dtype)) if activation in SILU else z.to(dtype).sigmoid())
    if gate is not None and not norm_before_gate:
        y = y * gate
    grouped = y.unflatten(-1, (groups, -1))
    y = (grouped * torch.rsqrt(grouped.square().mean(dim=-1, keepdim=True) + epsilon)).flatten(-2) * weight.to(dtype)
    if gate is not None and norm_before_gate:
        y = y * gate
    return y.to(x.dtype).contiguous()


def check_arguments(
    x: torch.Tensor, z: torch.Tensor | None, weight: torch.Tensor, group_size: int | None, activation: str
) -> int:
    """Refuses what would broadcast unnoticed. Returns the number of groups of a row."""
    check_parameter(weight, x)
    if z is not None and z.shape != x.shape:
        raise ValueError(f"z must have x's shape {list(x.shape)}, not {list(z.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    size = group_size or x.shape[-1]
    if x.shape[-1] % size:
        raise ValueError(f"rows of {x.shape[-1]} elements do not consist of groups of {size}")
    return x.shape[-1] // size


@rms_norm_gated.problem_of
def _(x, z, weight, epsilon, group_size=None, norm_before_gate=False, activation="swish") -> RMSNormGatedProblem:
    return RMSNormGatedProblem(x.device.type, x.dtype, x.shape[-1], group_size or x.shape[-1], weight.dtype)


@rms_norm_gated.cost
def _(x, z, weight, epsilon, group_size=None, norm_before_gate=False, activation="swish") -> Cost:
    gate_bytes, gate_flops = (0, 0) if z is None else (z.nbytes, 5 * z.numel())
    return Cost(bytes=2 * x.nbytes + weight.nbytes + gate_bytes, flops=4 * x.numel() + gate_flops)


@rms_norm_gated.sample_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(
        name, shape=(4, 64), *, gated=True, weight_dtype=dtype, std=1.0, layout=lambda *x: x, **arguments
    ) -> Sample:
        def make():
            rng = _samples.generator(name)
            x, z = layout(*(_samples.normal(shape, dtype, device, rng, std) for _ in range(2)))
            weight = _samples.normal(shape[-1:], weight_dtype, device, rng)
            return (x, z if gated else None, weight, 1e-5), arguments

        return Sample(name, make, scale=std)

    yield sample("zero tokens", (0, 64))
    yield sample("one token", (1, 128))
    yield sample("odd hidden size", (3, 77))
    yield sample("no gate", gated=False)
    yield sample("no gate, groups", gated=False, group_size=16)
    for before in (False, True):
        order = "norm before gate" if before else "gate before norm"
        yield sample(order, norm_before_gate=before)
        yield sample(f"{order}, sigmoid", norm_before_gate=before, activation="sigmoid")
        yield sample(f"{order}, groups", (5, 96), norm_before_gate=before, group_size=24)
        yield sample(f"{order}, strided rows", norm_before_gate=before, layout=_samples.side_by_side)
    yield sample("silu is swish", activation="silu")
    yield sample("groups of one element", (3, 8), group_size=1)
    yield sample("fp32 weight", weight_dtype=torch.float32)
    yield sample("strided columns", (7, 96), group_size=48, layout=lambda *both: map(_samples.column_major, both))
    yield sample("per head", (5, 4, 128), norm_before_gate=True)
    yield sample("per head, groups of strided rows", (5, 4, 64), group_size=32, layout=_samples.side_by_side)
    yield sample("large values", (2, 64), std=30.0)
    yield sample("Qwen3-Next heads", (6, 128), norm_before_gate=True, weight_dtype=torch.float32)
    yield sample("Mamba 2 groups", (2, 1024), group_size=128)


@rms_norm_gated.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    ones = {"dtype": dtype, "device": device}

    def sample(name: str, z=(3, 64), weight=(64,), **arguments) -> Sample:
        tensors = lambda: (torch.ones(shape, **ones) for shape in ((3, 64), z, weight))  # noqa: E731
        return Sample(name, lambda: ((*tensors(), 1e-5), arguments))

    yield sample("a gate of one row", z=(1, 64))
    yield sample("a gate of one column", z=(3, 1))
    yield sample("a weight of one element", weight=(1,))
    yield sample("a weight for a group", weight=(16,), group_size=16)
    yield sample("groups that do not fill a row", group_size=48)
    yield sample("an unknown activation", activation="relu")


@rms_norm_gated.bench_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(num_tokens: int) -> Sample:
        def make():
            rng = _samples.generator(str(num_tokens), device)
            x, z = (_samples.normal((num_tokens * 32, 128), dtype, device, rng) for _ in range(2))
            weight = _samples.normal((128,), torch.float32, device, rng)
            return (x, z, weight, 1e-6), {"norm_before_gate": True}

        return Sample(f"T{num_tokens} 32 heads of 128", make)

    for num_tokens in _samples.bench_tokens(device):
        yield sample(num_tokens)


_properties.rows_are_independent(rms_norm_gated, lambda run, x: run(x, x, x[0], 1e-6, 16))
