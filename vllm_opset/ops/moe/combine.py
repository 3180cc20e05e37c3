"""combine: the weighted sum over the experts of each token.

Semantics: `moe_sum` of vLLM after its second product has multiplied by the weights, with the shared experts added.
"""

from collections.abc import Iterator

import torch

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops._strides import check_contiguous
from vllm_opset.ops.contract import Cost, Problem, Sample, Tolerance, accumulator, op
from vllm_opset.ops.moe.permute import ABSENT, choices, map_of_half, places

# As ROUND_ONCE, but terms of both signs may cancel: what is left has the errors of the terms, which are of order 1.
CANCELLED = "a sum of weighted terms in fp32, rounded once; terms may cancel"
TOLERANCES = {
    torch.float64: Tolerance(1e-12, 1e-12, "fp64 throughout"),
    torch.float32: Tolerance(2e-6, 4e-6, CANCELLED),
    torch.bfloat16: Tolerance(2**-7, 1e-5, CANCELLED),
    torch.float16: Tolerance(2**-10, 1e-5, CANCELLED),
}


@op(tolerances=TOLERANCES)
def combine(
    expert_output: torch.Tensor,
    topk_weights: torch.Tensor,
    shared_output: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = Σ_k topk_weights[:, k] · expert_output[:, k] + shared_output, in fp32 and rounded once.

    expert_output: [num_tokens, top_k, hidden_size], contiguous. topk_weights: fp32 [num_tokens, top_k], contiguous.
    shared_output: [num_tokens, hidden_size] of expert_output's dtype, contiguous, or None: the shared experts' result.
    topk_ids, expert_map: as `permute` takes them. With topk_ids, the choices of experts that are not here add nothing,
    whatever expert_output holds for them.

    Returns a new contiguous tensor [num_tokens, hidden_size] of that dtype. Zero rows are allowed. Raises ValueError
    if the shapes differ, for no experts at all, for a map without ids, and for tensors that are not contiguous.
    """
    check_arguments(expert_output, topk_weights, shared_output, topk_ids, expert_map)
    wide = accumulator(expert_output)
    weighted = expert_output.to(wide) * topk_weights.to(wide).unsqueeze(-1)
    if topk_ids is not None:
        weighted = torch.where((places(topk_ids, expert_map) == ABSENT).unsqueeze(-1), 0, weighted)
    total = weighted.sum(dim=1)
    if shared_output is not None:
        total = total + shared_output.to(wide)
    return total.to(expert_output.dtype)


def check_arguments(expert_output, topk_weights, shared_output, topk_ids=None, expert_map=None) -> None:
    if expert_output.ndim != 3 or not expert_output.shape[1] or topk_weights.shape != expert_output.shape[:2]:
        raise ValueError(f"no weights of {list(topk_weights.shape)} for outputs of {list(expert_output.shape)}")
    if shared_output is not None and shared_output.shape != (expert_output.shape[0], expert_output.shape[2]):
        raise ValueError(f"shared_output {list(shared_output.shape)} is no sum of {list(expert_output.shape)}")
    if topk_ids is None and expert_map is not None:
        raise ValueError("an expert_map needs the topk_ids that it maps")
    if topk_ids is not None and topk_ids.shape != topk_weights.shape:
        raise ValueError(f"topk_ids {list(topk_ids.shape)} must be as many as topk_weights {list(topk_weights.shape)}")
    check_contiguous(
        expert_output=expert_output,
        topk_weights=topk_weights,
        shared_output=shared_output,
        topk_ids=topk_ids,
        expert_map=expert_map,
    )


@combine.problem_of
def _(expert_output, *_, **__) -> Problem:
    return Problem(expert_output.device.type, expert_output.dtype)


@combine.cost
def _(expert_output, topk_weights, shared_output=None, topk_ids=None, expert_map=None) -> Cost:
    num_tokens, top_k, hidden_size = expert_output.shape
    written = num_tokens * hidden_size * expert_output.element_size()
    given = (expert_output, topk_weights, shared_output, topk_ids, expert_map)
    return Cost(
        bytes=written + sum(tensor.nbytes for tensor in given if tensor is not None),
        flops=2 * num_tokens * top_k * hidden_size,
    )


def _sample(name: str, device, dtype, num_tokens: int, top_k: int, hidden_size: int, shared=False, on="cpu") -> Sample:
    def make():
        rng = _samples.generator(name, on)
        outputs = _samples.normal((num_tokens, top_k, hidden_size), dtype, device, rng)
        weights = torch.rand((num_tokens, top_k), generator=rng, device=rng.device).to(device)
        added = _samples.normal((num_tokens, hidden_size), dtype, device, rng) if shared else None
        return (outputs, weights, added), {}

    return Sample(name, make)


@combine.sample_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name: str, *shape: int, **how) -> Sample:
        return _sample(name, device, dtype, *shape, **how)

    yield sample("zero tokens", 0, 2, 64)
    yield sample("one token", 1, 2, 256)
    yield sample("one token, shared experts", 1, 8, 256, shared=True)
    yield sample("one expert a token", 5, 1, 64)
    yield sample("shared experts", 9, 4, 96, shared=True)
    yield sample("odd width", 7, 3, 77, shared=True)
    yield sample("one column", 3, 2, 1)
    yield sample("wide", 3, 8, 2880)

    def absent(name: str, num_tokens: int, top_k: int, hidden_size: int, mapped: bool) -> Sample:
        """A token without choices, or half of the experts, with NaN for those that are not here."""

        def make():
            (outputs, weights, added), _ = sample(name, num_tokens, top_k, hidden_size, shared=True).make()
            ids = choices(name, num_tokens, 8, top_k, device)
            ids[1:2] = ABSENT
            expert_map = map_of_half(8, device) if mapped else None
            outputs[places(ids, expert_map) == ABSENT] = torch.nan
            return (outputs, weights, added, ids, expert_map), {}

        return Sample(name, make)

    yield absent("padded rows", 4, 2, 64, mapped=False)
    yield absent("half of the experts are here", 9, 4, 96, mapped=True)
    yield absent("half of the experts are here, zero tokens", 0, 4, 96, mapped=True)


@combine.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name: str, *shapes: tuple[int, ...]) -> Sample:
        return Sample(name, lambda: (tuple(torch.ones(s, dtype=dtype, device=device) for s in shapes), {}))

    def by_columns(name: str, number: int) -> Sample:
        def make():
            given, _ = sample(name, (4, 2, 64), (4, 2), (4, 64)).make()
            return tuple(_samples.column_major(x) if i == number else x for i, x in enumerate(given)), {}

        return Sample(name, make)

    yield sample("one weight a token", (4, 2, 64), (4, 1))
    yield sample("weights of fewer tokens", (4, 2, 64), (1, 2))
    yield sample("no experts", (4, 0, 64), (4, 0))
    yield sample("a shared result of one row", (4, 2, 64), (4, 2), (1, 64))
    yield sample("experts of one token", (4, 2, 64), (4, 2), (4, 64), (1, 2))
    for number, name in enumerate(("outputs", "weights", "a shared result")):
        yield by_columns(f"{name} by columns", number)
    without_ids = sample("a map of no ids", (4, 2, 64), (4, 2))
    yield Sample(without_ids.name, lambda: (without_ids.make()[0], {"expert_map": map_of_half(8, device)}))


@combine.bench_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    for num_tokens in _samples.bench_tokens(device):
        yield _sample(f"T{num_tokens} k8 H2048", device, dtype, num_tokens, 8, 2048, on=device)


def _one_expert(run, x: torch.Tensor) -> torch.Tensor:
    return run(x.unsqueeze(1), torch.ones(len(x), 1, device=x.device))


_properties.rows_are_independent(combine, _one_expert)
