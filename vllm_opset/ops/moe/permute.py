"""permute: the order of tokens by expert, in blocks of one expert each.

Semantics: vLLM's `moe_align_block_size` with `pad_sorted_ids` and `ignore_invalid_experts`. This op also fixes the
order within an expert.

The layers of a step share no description of this order, as they share the batch of paged attention: each layer routes
its tokens anew, so there is nothing in common to share.
"""

from collections.abc import Iterator

import torch

from vllm_opset.ops import _properties, _samples
from vllm_opset.ops._strides import check_contiguous
from vllm_opset.ops.contract import Cost, Problem, Sample, op

ABSENT = -1


@op(dtypes=(torch.int32,), tolerances={})
def permute(
    topk_ids: torch.Tensor, num_experts: int, block_size: int, expert_map: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts the choices of all tokens by expert, and pads the choices of each expert to whole blocks.

    Choice c stands for topk_ids.flatten()[c], so it belongs to token c // top_k. The choices of an expert keep their
    order. Experts come in their order. The choices of experts that are not here have no place.

    topk_ids: int32 [num_tokens, top_k], contiguous, with −1 for a choice to leave out, such as those of padded rows.

    num_experts: of those that are here, whose weights this process has. expert_map: int32 [global number of experts],
    the place of each expert among those, −1 for the others. Without it, each id is the place.

    Returns (sorted_token_ids, expert_ids). sorted_token_ids: int32 [num_blocks * block_size], choices, with
    topk_ids.numel() in places that are empty. expert_ids: int32 [num_blocks], the place of each block's expert; −1 for
    empty blocks, which come last. num_blocks depends on the shapes alone, so nobody waits for the device. An id outside
    −1 … num_experts − 1, or outside the map, is an error of the caller that is not noticed.
    Raises ValueError if num_experts or block_size is below 1, if topk_ids is not two-dimensional, and if one of the
    tensors is not int32 or not contiguous.
    """
    check_arguments(topk_ids, num_experts, block_size, expert_map)
    num_choices = topk_ids.numel()
    experts = places(topk_ids, expert_map).flatten()
    experts = torch.where(experts == ABSENT, num_experts, experts)  # sorted last, and without blocks
    order = experts.argsort(stable=True)
    counts = (experts.unsqueeze(1) == torch.arange(num_experts, device=experts.device)).sum(dim=0)
    blocks = (counts + block_size - 1) // block_size
    ends, num_blocks = blocks.cumsum(0), blocks_for(num_choices, num_experts, block_size)
    first_rank, first_place = counts.cumsum(0) - counts, (ends - blocks) * block_size
    ranked = experts[order].clamp(max=num_experts - 1)
    place = first_place[ranked] + torch.arange(num_choices, device=order.device) - first_rank[ranked]
    nowhere = num_blocks * block_size  # a last place, for the choices of absent experts
    sorted_token_ids = topk_ids.new_full((nowhere + 1,), num_choices)
    sorted_token_ids[torch.where(experts[order] < num_experts, place, nowhere)] = order.int()
    expert_ids = torch.searchsorted(ends, torch.arange(num_blocks, device=ends.device), right=True)
    return sorted_token_ids[:nowhere].contiguous(), torch.where(expert_ids < num_experts, expert_ids, ABSENT).int()


def places(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """The place of each chosen expert among those that are here, int64 of topk_ids' shape; −1 for the others."""
    ids = topk_ids.long()
    if expert_map is None:
        return ids
    return torch.where(ids < 0, ABSENT, expert_map.long()[ids.clamp(min=0)])


def blocks_for(num_choices: int, num_experts: int, block_size: int) -> int:
    """The number of blocks that suffices for any choices: each expert may fill its last one in part."""
    return min(num_choices, num_choices // block_size + num_experts)


def check_arguments(topk_ids: torch.Tensor, num_experts: int, block_size: int, expert_map: torch.Tensor | None) -> None:
    if topk_ids.ndim != 2 or topk_ids.dtype != torch.int32:
        raise ValueError(f"topk_ids must be int32 [num_tokens, top_k], not {topk_ids.dtype} {list(topk_ids.shape)}")
    if num_experts < 1 or block_size < 1:
        raise ValueError(f"there are no {num_experts} experts, or no blocks of {block_size}")
    if expert_map is not None and expert_map.dtype != torch.int32:
        raise ValueError(f"expert_map must be int32, not {expert_map.dtype}")
    check_contiguous(topk_ids=topk_ids, expert_map=expert_map)


@permute.problem_of
def _(topk_ids, num_experts, block_size, expert_map=None) -> Problem:
    return Problem(topk_ids.device.type, topk_ids.dtype)


@permute.cost
def _(topk_ids, num_experts, block_size, expert_map=None) -> Cost:
    num_blocks = blocks_for(topk_ids.numel(), num_experts, block_size)
    read = topk_ids.nbytes + (0 if expert_map is None else expert_map.nbytes)
    return Cost(bytes=read + 4 * num_blocks * (block_size + 1), flops=topk_ids.numel())


def choices(name: str, num_tokens: int, num_experts: int, top_k: int, device: str, on: str = "cpu") -> torch.Tensor:
    """int32 [num_tokens, top_k], different experts in each row; expert 0 comes up often, the last one never.

    on: the device that draws them.
    """
    scores = torch.rand((num_tokens, num_experts), generator=_samples.generator(name, on), device=on)
    scores[:, 0] += 0.5
    if num_experts > top_k:
        scores[:, -1] = -1
    return scores.topk(top_k).indices.int().to(device)


def map_of_half(num_experts: int, device: str) -> torch.Tensor:
    """An expert map whose first half of the experts is here, in reverse."""
    here = torch.arange(num_experts // 2 - 1, -1, -1)
    return torch.cat([here, here.new_full((num_experts - len(here),), ABSENT)]).int().to(device)


@permute.sample_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(name: str, num_tokens: int, num_experts: int, top_k: int, block_size: int) -> Sample:
        return Sample(
            name, lambda: ((choices(name, num_tokens, num_experts, top_k, device), num_experts, block_size), {})
        )

    def given(name: str, ids: list[list[int]], num_experts: int, block_size: int) -> Sample:
        return Sample(name, lambda: ((torch.tensor(ids, dtype=dtype, device=device), num_experts, block_size), {}))

    def mapped(name: str, num_tokens: int, num_experts: int, top_k: int, block_size: int) -> Sample:
        def make():
            ids = choices(name, num_tokens, num_experts, top_k, device)
            return (ids, num_experts // 2, block_size, map_of_half(num_experts, device)), {}

        return Sample(name, make)

    yield sample("zero tokens", 0, 8, 2, 16)
    yield sample("one token", 1, 8, 2, 16)
    yield sample("one expert", 37, 1, 1, 16)
    yield sample("k = number of experts", 9, 4, 4, 16)
    yield sample("blocks of one", 13, 8, 2, 1)
    yield sample("Mixtral", 50, 8, 2, 16)
    yield sample("Qwen3-MoE", 40, 128, 8, 32)
    yield sample("60 experts", 21, 60, 4, 16)
    yield sample("thousands of choices", 300, 16, 8, 16)
    yield given("all tokens on one expert", [[3]] * 33, 8, 16)
    yield given("whole blocks", [[1, 2]] * 32, 4, 16)
    yield given("padded rows", [[1, 0], [2, 1], [-1, -1], [-1, -1]], 4, 4)
    yield given("padded rows alone", [[-1, -1]] * 5, 4, 4)
    yield mapped("half of the experts are here", 30, 8, 2, 16)
    yield mapped("half of many experts are here", 30, 64, 6, 16)


@permute.illegal_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    ids = torch.zeros(3, 2, dtype=dtype, device=device)
    yield Sample("no experts", lambda: ((ids, 0, 16), {}))
    yield Sample("blocks of nothing", lambda: ((ids, 4, 0), {}))
    yield Sample("one dimension", lambda: ((ids[0], 4, 16), {}))
    yield Sample("ids by columns", lambda: ((_samples.column_major(ids), 4, 16), {}))
    yield Sample("a map in int64", lambda: ((ids, 2, 16, map_of_half(4, device).long()), {}))


@permute.bench_inputs
def _(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(num_tokens: int) -> Sample:
        name = f"T{num_tokens} E128 k8"
        return Sample(name, lambda: ((choices(name, num_tokens, 128, 8, device), 128, 64), {}))

    yield from map(sample, _samples.bench_tokens(device))


@permute.property_
def each_choice_has_one_place(run, device: str, dtype: torch.dtype) -> None:
    """Each choice is in exactly one place, and in a block of its expert."""
    ids = choices("places", 29, 8, 2, device)
    sorted_token_ids, expert_ids = run(ids, 8, 16)
    taken = sorted_token_ids < ids.numel()
    found = sorted_token_ids[taken].long()
    everything = torch.arange(ids.numel(), device=device)
    _properties.equal("a choice has no place, or several", found.sort().values, everything)
    _properties.equal(
        "a choice is in a block of another expert", expert_ids.repeat_interleave(16)[taken], ids.flatten()[found]
    )
