"""route: the experts of each token and their weights, from the logits of a router.

Semantics: vLLM's `FusedTopKRouter`, `FusedTopKBiasRouter` and `GroupedTopKRouter`. This op also fixes what PyTorch's
topk leaves open: the choice among equal scores.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops.contract import Cost, Problem, Sample, Tolerance, accumulator, op

SCORING_FUNCS = ("softmax", "sigmoid")
EPSILON = 1e-20  # of the sum of weights, in DeepSeek V3's router and others
EXPONENTIALS = "exponentials and sums of weights in fp32, whatever the dtype of the logits"
TOLERANCES = {
    torch.float64: Tolerance(1e-12, 1e-12, "fp64 throughout"),
    torch.float32: Tolerance(4e-6, 1e-6, EXPONENTIALS),
}


@dataclass(frozen=True)
class RouteProblem(Problem):
    """num_experts: the number of columns of the logits. top_k: the experts of a token. bias: whether there is one."""

    num_experts: int
    top_k: int
    scoring_func: str = "softmax"
    bias: bool = False
    num_expert_group: int = 1
    topk_group: int = 1


@op(problem=RouteProblem, tolerances=TOLERANCES)
def route(
    router_logits: torch.Tensor,
    top_k: int,
    scoring_func: str = "softmax",
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
    num_expert_group: int = 1,
    topk_group: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses top_k experts for each token, in the order of falling scores.

    - scores = softmax(router_logits) over the experts, or their sigmoid, in fp32.

    - A token's choice goes by scores + e_score_correction_bias. Of equal ones, the lower expert comes first. PyTorch's
      topk leaves that open, so a model's own code may choose others of the same score. Without a bias, the choice goes
      by the logits, which have the order of the scores, so that rounding makes no ties.

    - With several groups of experts, adjacent ones of equal number, only the topk_group best groups of a token
      compete. The value of a group is its largest score or, with a bias, the sum of its two largest.

    - The weights are the scores without the bias. With renormalize they are divided by their sum + 1e-20, then they are
      multiplied by routed_scaling_factor. So a token whose chosen scores are all 0 in fp32 gets weights of 0, as by
      routers with a bias in transformers and by vLLM's compiled kernels. vLLM's code in PyTorch gives NaN there.
      Elsewhere, 1e-20 changes only sums below 1e-12. A softmax over the chosen logits alone, as gpt-oss computes it, is
      the renormalised softmax.

    router_logits: [num_tokens, num_experts], any strides. e_score_correction_bias: [num_experts], of any float dtype.
    Zero rows are allowed. Returns (topk_weights, topk_ids), contiguous [num_tokens, top_k] in fp32 and int32. A row
    with NaN gets any experts that exist, each once.

    Raises ValueError for another scoring_func, for fewer experts than top_k in the groups that compete, if the groups
    are not of equal size, and if the bias has another shape.
    """
    check_arguments(router_logits, top_k, scoring_func, e_score_correction_bias, num_expert_group, topk_group)
    logits = router_logits.to(accumulator(router_logits))
    scores = logits.softmax(dim=-1) if scoring_func == "softmax" else logits.sigmoid()
    choice = logits
    if e_score_correction_bias is not None:
        choice = scores + e_score_correction_bias.to(scores.dtype)
    if num_expert_group > 1:
        choice = keep_groups(choice, num_expert_group, topk_group, 1 if e_score_correction_bias is None else 2)
    topk_ids = _largest(choice, top_k)
    weights = scores.gather(1, topk_ids)
    if renormalize:
        weights = renormalised(weights)
    return (weights * routed_scaling_factor).contiguous(), topk_ids.int().contiguous()


def renormalised(weights: torch.Tensor) -> torch.Tensor:
    return weights / (weights.sum(dim=-1, keepdim=True) + EPSILON)


def keep_groups(choice: torch.Tensor, num_expert_group: int, topk_group: int, largest: int) -> torch.Tensor:
    """choice [T, E] with −inf outside of the topk_group groups whose `largest` largest values have the largest sums."""
    by_group = choice.unflatten(1, (num_expert_group, -1))
    groups = _largest(by_group.sort(dim=-1, descending=True).values[..., :largest].sum(dim=-1), topk_group)
    competes = torch.zeros(by_group.shape[:2], dtype=torch.bool, device=choice.device).scatter(1, groups, True)
    return by_group.masked_fill(~competes.unsqueeze(-1), -torch.inf).flatten(1)


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The columns of the largest values of each row; of equal ones, the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def check_arguments(router_logits, top_k, scoring_func, e_score_correction_bias, num_expert_group, topk_group) -> None:
    num_experts = router_logits.shape[1]
    if scoring_func not in SCORING_FUNCS:
        raise ValueError(f"scoring_func must be one of {', '.join(SCORING_FUNCS)}, not {scoring_func!r}")
    if num_expert_group < 1 or num_experts % num_expert_group or not 1 <= topk_group <= num_expert_group:
        raise ValueError(f"{num_experts} experts cannot compete in {topk_group} of {num_expert_group} equal groups")
    if not 1 <= top_k <= num_experts // num_expert_group * topk_group:
        raise ValueError(f"{top_k} experts cannot be chosen of {num_experts // num_expert_group * topk_group}")
    if e_score_correction_bias is not None and e_score_correction_bias.shape != (num_experts,):
        raise ValueError(f"e_score_correction_bias must be [{num_experts}], not {list(e_score_correction_bias.shape)}")


@route.problem_of
def _(
    router_logits,
    top_k,
    scoring_func="softmax",
    renormalize=True,
    routed_scaling_factor=1.0,
    e_score_correction_bias=None,
    num_expert_group=1,
    topk_group=1,
) -> RouteProblem:
    bias = e_score_correction_bias is not None
    sizes = router_logits.shape[1], top_k
    how = scoring_func, bias, num_expert_group, topk_group
    return RouteProblem(router_logits.device.type, router_logits.dtype, *sizes, *how)


@route.cost
def _(router_logits, top_k, *_, **__) -> Cost:
    """Reads each logit once, and computes at least one exponential for each."""
    return Cost(bytes=router_logits.nbytes + 8 * top_k * len(router_logits), flops=2 * router_logits.numel())


def _sample(name: str, device: str, dtype: torch.dtype, num_tokens: int, num_experts: int, top_k: int, **how) -> Sample:
    """A sample. bias: whether there is one. layout: of the logits. ties: whether few values occur, each often."""
    how = dict(how)
    bias, ties = how.pop("bias", False), how.pop("ties", False)
    layout = how.pop("layout", lambda logits: logits)

    def make():
        rng = _samples.generator(name)
        logits = _samples.normal((num_tokens, num_experts), dtype, device, rng, 2.0)
        if ties:
            logits = logits.round()
        arguments = dict(how)
        if bias:
            arguments["e_score_correction_bias"] = _samples.normal((num_experts,), torch.float32, device, rng, 0.3)
        return (layout(logits), top_k), arguments

    return Sample(name, make)


@route.sample_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name: str, *shape: int, **how) -> Sample:
        return _sample(name, device, dtype, *shape, **how)

    sigmoid = {"scoring_func": "sigmoid"}
    groups = {"num_expert_group": 4, "topk_group": 2}
    yield sample("zero tokens", 0, 8, 2)
    yield sample("one token", 1, 8, 2)
    yield sample("one expert", 3, 1, 1)
    yield sample("all experts", 5, 8, 8, renormalize=False)
    yield sample("Mixtral", 19, 8, 2)
    yield sample("OLMoE", 7, 64, 8, renormalize=False)
    yield sample("Qwen3-MoE", 7, 128, 8)
    yield sample("Qwen2-MoE, 60 experts", 7, 60, 4, renormalize=False)
    yield sample("scaled", 7, 16, 4, routed_scaling_factor=2.5)
    yield sample("sigmoid", 7, 16, 4, **sigmoid)
    yield sample("sigmoid, not renormalised, scaled", 7, 16, 4, **sigmoid, renormalize=False, routed_scaling_factor=2.5)
    yield sample("sigmoid, bias", 9, 32, 4, **sigmoid, bias=True)
    yield sample("softmax, bias", 9, 32, 4, bias=True)
    yield sample("groups by their largest", 9, 32, 4, **groups)
    yield sample("groups by two", 9, 32, 4, **sigmoid, bias=True, **groups)
    yield sample("three groups of five", 9, 15, 4, bias=True, num_expert_group=3, topk_group=1)
    yield sample("DeepSeek V3", 3, 256, 8, **sigmoid, bias=True, num_expert_group=8, topk_group=4)
    yield sample("ties", 19, 16, 4, ties=True)
    yield sample("ties at most cut-offs", 19, 128, 8, ties=True)
    yield sample("ties among groups", 19, 32, 6, ties=True, **groups)
    yield sample("strided rows", 5, 32, 4, layout=_samples.row_view)
    yield sample("column-major", 5, 32, 4, layout=_samples.column_major)


@route.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name: str, top_k: int, **arguments) -> Sample:
        return Sample(name, lambda: ((torch.ones(3, 8, dtype=dtype, device=device), top_k), arguments))

    yield sample("more experts than there are", 9)
    yield sample("no experts", 0)
    yield sample("more experts than compete", 3, num_expert_group=4, topk_group=1)
    yield sample("groups of different sizes", 2, num_expert_group=3)
    yield sample("more groups than there are", 2, num_expert_group=2, topk_group=3)
    yield sample("another scoring function", 2, scoring_func="relu")
    yield sample("a bias of one element", 2, e_score_correction_bias=torch.ones(1, device=device))


@route.bench_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    for num_tokens in _samples.bench_tokens(device):
        yield _sample(f"T{num_tokens} E128 k8", device, dtype, num_tokens, 128, 8)


@route.property_
def a_softmax_of_the_chosen_logits(run, device: str, dtype: torch.dtype) -> None:
    """Renormalised weights are the softmax over the chosen logits, as gpt-oss computes it."""
    (logits, top_k), _ = _sample("softmax after top-k", device, dtype, 9, 32, 4).make()
    weights, ids = run(logits, top_k)
    want = logits.float().gather(1, ids.long()).softmax(dim=-1)
    _properties.equal("the weights are no softmax of the chosen logits", weights, want, rtol=1e-5, atol=1e-6)


@route.property_
def different_experts_whatever_the_logits(run, device: str, dtype: torch.dtype) -> None:
    """A row of NaN gets experts that exist too: a start-up may route memory that no kernel wrote."""
    logits = torch.full((3, 20), torch.nan, dtype=dtype, device=device)
    logits[1, ::2], logits[2] = 1.0, -torch.inf
    _, ids = run(logits, 15)
    found = torch.tensor([len(set(row) & set(range(20))) for row in ids.tolist()])
    _properties.equal("an expert was chosen twice, or is none", found, torch.full_like(found, 15))


@route.property_
def experts_without_probability_are_equal(run, device: str, dtype: torch.dtype) -> None:
    """Probabilities that are too small for fp32 are 0. Then the first expert is chosen, with the weight 0."""
    logits = torch.tensor([[0.0, -120.0, -110.0], [0.0, -torch.inf, -130.0]], dtype=dtype, device=device)
    weights, ids = run(logits, 2, e_score_correction_bias=torch.zeros(3, device=device))
    _properties.equal("another expert is chosen", ids, torch.tensor([[0, 1], [0, 1]], dtype=ids.dtype, device=device))
    _properties.equal("a weight is not 0", weights, torch.tensor([[1.0, 0.0], [1.0, 0.0]], device=device))


@route.property_
def chosen_scores_of_zero_are_weights_of_zero(run, device: str, dtype: torch.dtype) -> None:
    """All scores of the first two rows are 0 in fp32, and those of the third about as large as EPSILON."""
    logits = torch.tensor([[-200.0], [-torch.inf], [-45.0]], dtype=dtype, device=device).expand(3, 8).contiguous()
    weights, _ = run(logits, 4, "sigmoid", e_score_correction_bias=torch.zeros(8, device=device))
    small = math.exp(-45)
    want = torch.tensor([0.0, 0.0, small / (4 * small + EPSILON)], device=device)[:, None].expand_as(weights)
    _properties.equal("the weights are not divided by their sum + 1e-20", weights, want, rtol=1e-4, atol=0.0)


@route.property_
def chosen_probabilities_of_zero_are_weights_of_zero(run, device: str, dtype: torch.dtype) -> None:
    """A bias has experts chosen whose probabilities are too small for fp32."""
    logits = torch.tensor([[0.0, -120.0, -110.0, -130.0]], dtype=dtype, device=device)
    weights, ids = run(logits, 2, e_score_correction_bias=torch.tensor([-5.0, 0.0, 0.0, 0.0], device=device))
    _properties.equal("another expert is chosen", ids, torch.tensor([[1, 2]], dtype=ids.dtype, device=device))
    _properties.equal("a weight is not 0", weights, torch.zeros_like(weights))


_properties.rows_are_independent(route, lambda run, x: run(x, 4)[0])
