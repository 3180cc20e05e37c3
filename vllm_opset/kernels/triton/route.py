"""route: each program holds the scores of whole rows in registers, and takes the largest ones by one.

Scores are compared as integers of their order. So what was taken differs from −∞. Each choice is another expert, and
exists, even where logits are NaN, as in memory that no kernel wrote.
"""

import torch
import triton
import triton.language as tl

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _launch, _supports
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._rows import enough_warps
from vllm_opset.ops.moe.route import EPSILON, RouteProblem, check_arguments

MAX_EXPERTS = 4096  # registers hold a row of scores and its order
LEAST = tl.constexpr(-0x7F800001)  # it is the order of −∞
NOTHING = tl.constexpr(-(2**31))  # experts that cannot be taken have this order, below that of −∞
NAN = tl.constexpr(0x7FC00000)
EPSILON_OF_SUM = tl.constexpr(EPSILON)


def supports(problem: RouteProblem) -> str | None:
    """fp32, bf16 and fp16, computed in fp32; rows of up to 4,096 experts."""
    if problem.num_experts > MAX_EXPERTS:
        return f"rows are held in registers, up to {MAX_EXPERTS} experts"
    return _supports.floats(problem)


@kernel(ops.route, name="triton", supports=supports)
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
    check_arguments(router_logits, top_k, scoring_func, e_score_correction_bias, num_expert_group, topk_group)
    num_tokens, num_experts = router_logits.shape
    weights = router_logits.new_empty((num_tokens, top_k), dtype=torch.float32)
    ids = router_logits.new_empty((num_tokens, top_k), dtype=torch.int32)
    bias = None if e_score_correction_bias is None else e_score_correction_bias.contiguous()
    values = _launch.parameters("route", router_logits.device, num_tokens)
    block = _launch.next_power_of_2(num_experts)
    held = max(1, values["tile"] // block)
    if num_tokens:
        _launch.launch(
            _route, (_launch.cdiv(num_tokens, held),),
            router_logits, *router_logits.stride(), bias, weights, ids, num_tokens, float(routed_scaling_factor),
            EXPERTS=num_experts, TOP_K=top_k, SOFTMAX=scoring_func == "softmax", RENORMALIZE=renormalize,
            GROUPS=num_expert_group, TOP_GROUPS=topk_group, ROWS=held, BLOCK=block,
            CHOSEN=_launch.next_power_of_2(top_k), GROUP_BLOCK=_launch.next_power_of_2(num_expert_group),
            num_warps=enough_warps(values["warps"], 2 * held * block), **_launch.launch_options(router_logits.device),
        )  # fmt: skip
    return weights, ids


@triton.jit
def _order(values):
    """int32 numbers that have the order of fp32 values. NaN comes after all numbers."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # the sum makes 0 of −0
    bits = tl.where(values == values, bits, NAN)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _first_of_largest(order, index, COUNT: tl.constexpr):
    """For each row, the least index of its largest elements."""
    largest = tl.max(order, 1, keep_dims=True)
    return tl.min(tl.where(order == largest, index, COUNT), 1, keep_dims=True)


@triton.jit
def _at(values, index, wanted):
    """For each row, the value at the wanted index."""
    return tl.sum(tl.where(index == wanted, values, 0.0), 1, keep_dims=True)


@triton.jit
def _of_best_groups(
    choice, order, column, ROWS: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, SUM_OF_TWO: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr,
):  # fmt: skip
    """order, with that of −∞ for experts outside of the best groups."""
    GROUP_SIZE: tl.constexpr = EXPERTS // GROUPS
    group = tl.arange(0, GROUP_BLOCK)[None, :]
    values = tl.zeros([ROWS, GROUP_BLOCK], tl.float32)
    for number in tl.range(0, GROUPS):
        within = tl.where(column // GROUP_SIZE == number, order, NOTHING)
        first = _first_of_largest(within, column, BLOCK)
        value = _at(choice, column, first)
        if SUM_OF_TWO and GROUP_SIZE > 1:
            second = _first_of_largest(tl.where(column == first, NOTHING, within), column, BLOCK)
            value += _at(choice, column, second)
        values = tl.where(group == number, value, values)
    left = tl.where(group < GROUPS, _order(values), NOTHING)
    competes = tl.zeros([ROWS, BLOCK], tl.int1)
    for _ in tl.range(0, TOP_GROUPS):
        best = _first_of_largest(left, group, GROUP_BLOCK)
        competes |= column // GROUP_SIZE == best
        left = tl.where(group == best, NOTHING, left)
    return tl.where(competes, order, LEAST)


@triton.jit(do_not_specialize=["num_tokens"])
def _route(
    logits, row_stride, column_stride, bias, weights, ids, num_tokens, scale,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr, GROUP_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    is_expert, is_token = column < EXPERTS, row < num_tokens
    place = row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride
    value = tl.load(logits + place, is_token & is_expert, float("-inf")).to(tl.float32)
    value = tl.where(is_token, value, 0.0)  # no NaN of −∞ − −∞ in rows that do not exist
    if SOFTMAX:
        score = tl.exp(value - tl.max(tl.where(is_expert, value, float("-inf")), 1, keep_dims=True))
        score = tl.where(is_expert, score, 0.0)
        score = score / tl.sum(score, 1, keep_dims=True)
    else:
        score = tl.sigmoid(value)
    choice = value
    if bias is not None:
        choice = score + tl.load(bias + column, is_expert, 0.0).to(tl.float32)
    left = tl.where(is_expert, _order(choice), NOTHING)
    if GROUPS > 1:
        left = _of_best_groups(
            choice, left, column, ROWS, BLOCK, EXPERTS, bias is not None, GROUPS, TOP_GROUPS, GROUP_BLOCK
        )
        left = tl.where(is_expert, left, NOTHING)
    rank = tl.arange(0, CHOSEN)[None, :]
    chosen = tl.zeros([ROWS, CHOSEN], tl.int32)
    weight = tl.zeros([ROWS, CHOSEN], tl.float32)
    for number in tl.range(0, TOP_K):
        expert = _first_of_largest(left, column, BLOCK)
        left = tl.where(column == expert, NOTHING, left)
        chosen = tl.where(rank == number, expert, chosen)
        weight = tl.where(rank == number, _at(score, column, expert), weight)
    if RENORMALIZE:
        weight = weight / (tl.sum(weight, 1, keep_dims=True) + EPSILON_OF_SUM)
    out = row.to(tl.int64) * TOP_K + rank
    stored = is_token & (rank < TOP_K)
    tl.store(weights + out, weight * scale, stored)
    tl.store(ids + out, chosen, stored)
