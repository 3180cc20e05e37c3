"""combine: each program sums the experts' results for some columns of some tokens, in fp32.

With a map of experts, it does not read the results of those that are not here. Without one, all experts are here, and
results are read before it is known whether a choice is −1.
"""

import torch
import triton
import triton.language as tl

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _launch, _supports
from vllm_opset.kernels.triton._launch import pdl_wait
from vllm_opset.kernels.triton._rows import enough_warps
from vllm_opset.kernels.triton.permute import place_of
from vllm_opset.ops.moe.combine import check_arguments


@kernel(ops.combine, name="triton", supports=_supports.floats)
def combine(
    expert_output: torch.Tensor,
    topk_weights: torch.Tensor,
    shared_output: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    check_arguments(expert_output, topk_weights, shared_output, topk_ids, expert_map)
    num_tokens, top_k, columns = expert_output.shape
    out = expert_output.new_empty((num_tokens, columns))
    values = _launch.parameters("combine", out.device, num_tokens)
    block = min(values["tile"], _launch.next_power_of_2(columns))
    held = values["tile"] // block
    if num_tokens:
        _launch.launch(
            _combine, (_launch.cdiv(num_tokens, held), _launch.cdiv(columns, block)),
            expert_output, topk_weights, shared_output, topk_ids, expert_map, out, num_tokens,
            TOP_K=top_k, COLUMNS=columns, ROWS=held, BLOCK=block,
            num_warps=enough_warps(values["warps"], values["tile"]), **_launch.launch_options(out.device),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _combine(
    expert_output, topk_weights, shared_output, topk_ids, expert_map, out, num_tokens,
    TOP_K: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_token = token < num_tokens
    mask = is_token & (column < COLUMNS)
    place = token.to(tl.int64) * COLUMNS + column
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):  # unrolled, so that all loads are under way at once
        choice = token.to(tl.int64) * TOP_K + k
        is_here = is_token
        if topk_ids is not None:
            is_here = place_of(topk_ids, expert_map, choice, is_token) >= 0
        is_read = is_here if expert_map is not None else is_token
        value = tl.load(expert_output + choice * COLUMNS + column, mask & is_read, 0.0).to(tl.float32)
        value *= tl.load(topk_weights + choice, is_token, 0.0)
        total += tl.where(is_here, value, 0.0)
    if shared_output is not None:
        total += tl.load(shared_output + place, mask, 0.0).to(tl.float32)
    tl.store(out + place, total, mask)
