"""route: each program holds the scores of whole rows in registers, and takes the largest ones by one.

Scores are compared as integers that hold the score and the expert. So no two are equal, of equal scores the lower
expert wins, and each choice is an expert that exists even where logits are NaN, as in memory that no kernel wrote.
"""

import torch
import triton
import triton.language as tl

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _launch, _supports
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._rows import enough_warps
from vllm_opset.ops.moe.route import RouteProblem, check_arguments

MAX_EXPERTS = 4096  # a row of them is held in registers, with its keys of 8 bytes
NOTHING = tl.constexpr(-(2**63))  # a key below that of any expert


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
        _route[(_launch.cdiv(num_tokens, held),)](
            router_logits, *router_logits.stride(), bias, weights, ids, num_tokens, float(routed_scaling_factor),
            EXPERTS=num_experts, TOP_K=top_k, SOFTMAX=scoring_func == "softmax", RENORMALIZE=renormalize,
            GROUPS=num_expert_group, TOP_GROUPS=topk_group, ROWS=held, BLOCK=block,
            CHOSEN=_launch.next_power_of_2(top_k), GROUP_BLOCK=_launch.next_power_of_2(num_expert_group),
            num_warps=enough_warps(values["warps"], 2 * held * block), **_launch.launch_options(router_logits.device),
        )  # fmt: skip
    return weights, ids


@triton.jit
def _keys(values, index):
    """int64 keys that have the order of fp32 values, of equal ones the lower index first. NaN is above all numbers."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # the sum makes 0 of −0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _index(key):
    """The index in a key."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _of_best_groups(
    choice, keys, column, ROWS: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, SUM_OF_TWO: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr,
):  # fmt: skip
    """keys, with those of −∞ for experts outside of the best groups."""
    GROUP_SIZE: tl.constexpr = EXPERTS // GROUPS
    group = tl.arange(0, GROUP_BLOCK)[None, :]
    values = tl.zeros([ROWS, GROUP_BLOCK], tl.float32)
    for number in tl.range(0, GROUPS):
        within = tl.where(column // GROUP_SIZE == number, keys, NOTHING)
        first = tl.max(within, 1, keep_dims=True)
        value = tl.sum(tl.where(column == _index(first), choice, 0.0), 1, keep_dims=True)
        if SUM_OF_TWO and GROUP_SIZE > 1:
            second = tl.max(tl.where(within == first, NOTHING, within), 1, keep_dims=True)
            value += tl.sum(tl.where(column == _index(second), choice, 0.0), 1, keep_dims=True)
        values = tl.where(group == number, value, values)
    left = tl.where(group < GROUPS, _keys(values, group), NOTHING)
    competes = tl.zeros([ROWS, BLOCK], tl.int1)
    for _ in tl.range(0, TOP_GROUPS):
        best = tl.max(left, 1, keep_dims=True)
        competes |= column // GROUP_SIZE == _index(best)
        left = tl.where(left == best, NOTHING, left)
    excluded = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)
    return tl.where(competes, keys, _keys(excluded, column))


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
    left = tl.where(is_expert, _keys(choice, column), NOTHING)
    if GROUPS > 1:
        left = _of_best_groups(
            choice, left, column, ROWS, BLOCK, EXPERTS, bias is not None, GROUPS, TOP_GROUPS, GROUP_BLOCK
        )
        left = tl.where(is_expert, left, NOTHING)
    rank = tl.arange(0, CHOSEN)[None, :]
    chosen = tl.zeros([ROWS, CHOSEN], tl.int32)
    weight = tl.zeros([ROWS, CHOSEN], tl.float32)
    for number in tl.range(0, TOP_K):
        best = tl.max(left, 1, keep_dims=True)
        expert = _index(best)
        left = tl.where(left == best, NOTHING, left)
        chosen = tl.where(rank == number, expert, chosen)
        weight = tl.where(rank == number, tl.sum(tl.where(column == expert, score, 0.0), 1, keep_dims=True), weight)
    if RENORMALIZE:
        weight = weight / tl.sum(weight, 1, keep_dims=True)
    out = row.to(tl.int64) * TOP_K + rank
    stored = is_token & (rank < TOP_K)
    tl.store(weights + out, weight * scale, stored)
    tl.store(ids + out, chosen, stored)
