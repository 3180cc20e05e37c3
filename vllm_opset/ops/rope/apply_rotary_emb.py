"""apply_rotary_emb: rotates whole heads by cosines and sines that were gathered before, as vision encoders do.

Semantics: vLLM's `ApplyRotaryEmb.forward_static`. vLLM computes in x's dtype, or in fp32 if its layer says so. This op
always computes in fp32.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops.contract import Cost, Problem, Sample, accumulator, op


@dataclass(frozen=True)
class ApplyRotaryEmbProblem(Problem):
    """is_neox_style: as in the op."""

    is_neox_style: bool


@op(problem=ApplyRotaryEmbProblem)
def apply_rotary_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox_style: bool = True) -> torch.Tensor:
    """(a · cos − b · sin, b · cos + a · sin) for each pair (a, b) of each head, in fp32 and rounded once.

    Pair i of a head is elements (i, i + head_size/2) in NeoX style, and (2i, 2i + 1), interleaved, in GPT-J style.

    x: [S, H, head_size] or [B, S, H, head_size], any strides. cos, sin: [S, head_size / 2], of x's dtype or fp32, any
    strides; all sequences of a batch share them. S may be 0. Returns a new contiguous tensor of x's shape and dtype.
    Raises ValueError if shapes disagree or head_size is odd.
    """
    check_arguments(x, cos, sin)
    dtype = accumulator(x, cos)
    cos, sin = cos.to(dtype).unsqueeze(-2), sin.to(dtype).unsqueeze(-2)
    a, b = x.chunk(2, dim=-1) if is_neox_style else (x[..., ::2], x[..., 1::2])
    a, b = a.to(dtype), b.to(dtype)
    rotated = a * cos - b * sin, b * cos + a * sin
    y = torch.cat(rotated, dim=-1) if is_neox_style else torch.stack(rotated, dim=-1).flatten(-2)
    return y.to(x.dtype).contiguous()


def check_arguments(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Refuses shapes that would broadcast unnoticed."""
    if x.dim() not in (3, 4) or x.shape[-1] % 2:
        raise ValueError(f"x must be [S, H, head_size] or [B, S, H, head_size] of an even size, not {list(x.shape)}")
    angles = (x.shape[-3], x.shape[-1] // 2)
    if cos.shape != angles or sin.shape != angles:
        raise ValueError(f"cos and sin must be {list(angles)}, not {list(cos.shape)} and {list(sin.shape)}")


@apply_rotary_emb.problem_of
def _(x, cos, sin, is_neox_style=True) -> ApplyRotaryEmbProblem:
    return ApplyRotaryEmbProblem(x.device.type, x.dtype, is_neox_style)


@apply_rotary_emb.cost
def _(x, cos, sin, is_neox_style=True) -> Cost:
    return Cost(bytes=2 * x.nbytes + cos.nbytes + sin.nbytes, flops=3 * x.numel())


def angles(num_tokens: int, head_size: int, dtype: torch.dtype, device: str, rng: torch.Generator):
    """Cosines and sines of random angles."""
    random = torch.rand(num_tokens, head_size // 2, generator=rng, device=rng.device) * 6.3
    return random.cos().to(device, dtype), random.sin().to(device, dtype)


@apply_rotary_emb.sample_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(
        name: str, shape=(5, 4, 64), *, angle_dtype=dtype, neox=True, std=1.0, layout=lambda x: x, of_angles=lambda x: x
    ) -> Sample:
        def make():
            rng = _samples.generator(name)
            x = layout(_samples.normal(shape, dtype, device, rng, std))
            cos, sin = map(of_angles, angles(shape[-3], shape[-1], angle_dtype, device, rng))
            return (x, cos, sin, neox), {}

        return Sample(name, make, scale=std)

    yield sample("zero tokens", (0, 4, 64))
    yield sample("one token", (1, 4, 64))
    for neox, style in ((True, "NeoX"), (False, "GPT-J")):
        yield sample(style, neox=neox)
        yield sample(f"{style}, batch", (2, 3, 4, 32), neox=neox)
        yield sample(f"{style}, one pair, one head", (3, 1, 2), neox=neox)
        yield sample(f"{style}, heads of 80", (3, 5, 80), neox=neox)
        yield sample(f"{style}, strided heads", neox=neox, layout=_samples.row_view)
        yield sample(f"{style}, strided columns", neox=neox, layout=_samples.column_major)
        yield sample(f"{style}, strided batch", (2, 3, 4, 32), neox=neox, layout=lambda x: x.mT.contiguous().mT)
    yield sample("heads before tokens in memory", layout=lambda x: x.transpose(0, 1).contiguous().transpose(0, 1))
    yield sample("fp32 angles", angle_dtype=torch.float32)
    yield sample("strided angles", of_angles=_samples.row_view)
    yield sample("large values", std=100.0)
    yield sample("Qwen2.5-VL heads", (6, 16, 80), angle_dtype=torch.float32)


@apply_rotary_emb.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name: str, x=(3, 2, 64), cos=(3, 32), sin=(3, 32)) -> Sample:
        return Sample(name, lambda: (tuple(torch.ones(s, dtype=dtype, device=device) for s in (x, cos, sin)), {}))

    yield sample("an odd head size", x=(3, 2, 63))
    yield sample("one head without its dimension", x=(3, 64))
    yield sample("angles of one token", cos=(1, 32), sin=(1, 32))
    yield sample("angles of a part of a head", cos=(3, 16), sin=(3, 16))
    yield sample("sines of whole heads", sin=(3, 64))


@apply_rotary_emb.bench_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(num_tokens: int) -> Sample:
        def make():
            rng = _samples.generator(str(num_tokens), device)
            x = _samples.normal((num_tokens, 16, 80), dtype, device, rng)
            return (x, *angles(num_tokens, 80, dtype, device, rng)), {}

        return Sample(f"S{num_tokens} H16 D80", make)

    for num_tokens in _samples.bench_tokens(device):
        yield sample(num_tokens)


@apply_rotary_emb.property_
def tokens_are_independent(run, device: str, dtype: torch.dtype) -> None:
    """NaN in other tokens changes no bit of a token."""
    rng = _samples.generator("tokens")
    x, (cos, sin) = _samples.normal((6, 4, 64), dtype, device, rng), angles(6, 64, dtype, device, rng)
    poisoned = x.clone()
    poisoned[1::2] = float("nan")
    for neox in (True, False):
        alone, among_nan = run(x, cos, sin, neox)[::2], run(poisoned, cos, sin, neox)[::2]
        _properties.equal("NaN in one token changes another", among_nan, alone)
