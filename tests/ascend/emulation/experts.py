"""The operators of mixtures of experts, from the formulas in their documents and in CANN's.

What a document calls undefined is NaN, or the least integer.
"""

import torch

from emulation.quantised import exactly, is_matrix, stored
from emulation.registry import documented as limits
from emulation.registry import dtype_of, emulates, refuse, require


@emulates("npu::npu_moe_gating_top_k_softmax")
def npu_moe_gating_top_k_softmax(x, finished=None, k=1):
    """The first of equal scores comes first, as in the tests of CANN's open repository ops-transformer."""
    if finished is not None or x.dim() != 2:
        raise NotImplementedError("only two dimensions are emulated, without finished rows")
    require(len(x) > 0, "x has rows")
    refuse(limits.gating_softmax(x.shape[1], k))
    scores = x.float().softmax(-1)
    expert_idx = largest(scores, k)
    row_idx = torch.arange(expert_idx.numel(), dtype=torch.int32).view(k, -1).t().contiguous()
    return scores.gather(1, expert_idx).to(x.dtype), expert_idx.int(), row_idx


@emulates("npu::npu_moe_gating_top_k")
def npu_moe_gating_top_k(
    x, k, *, bias=None, input_ids=None, tid2eid=None, k_group=1, group_count=1, group_select_mode=0, renorm=0,
    norm_type=0, out_flag=False, routed_scaling_factor=1.0, eps=1e-20,
):  # fmt: skip
    require(x.dim() == 2 and len(x) > 0, "x is [rows, experts]")
    require(input_ids is tid2eid is None, "there is no table of experts")
    require(renorm == 0 and norm_type in (0, 1) and group_select_mode in (0, 1), "renorm is 0, the modes are 0 or 1")
    refuse(limits.gating(x.shape[1], k, group_count, k_group))
    scores = x.float().sigmoid() if norm_type else x.float().softmax(-1)
    choice = scores
    if bias is not None:
        require(bias.dtype == x.dtype and bias.shape == x.shape[1:], "bias is [experts], of x's dtype")
        choice = scores + bias.float()
    if group_count > 1:
        by_group = choice.unflatten(1, (group_count, -1))
        best = by_group.topk(2).values.sum(-1) if group_select_mode else by_group.amax(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, largest(best, k_group), True)
        choice = by_group.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    expert_idx = largest(choice, k)
    y = scores.gather(1, expert_idx)
    if norm_type:
        y = y / (y.sum(-1, keepdim=True) + eps)
    out = scores if out_flag else torch.full_like(scores, torch.nan)
    return (y * routed_scaling_factor).to(x.dtype), expert_idx.int(), out


def largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


@emulates("npu::npu_moe_init_routing_v2")
def npu_moe_init_routing_v2(
    x, expert_idx, *, scale=None, offset=None, active_num=-1, expert_capacity=-1, expert_num=-1, drop_pad_mode=0,
    expert_tokens_num_type=0, expert_tokens_num_flag=False, quant_mode=-1, active_expert_range=[], row_idx_type=0,  # noqa: B006 it is the schema's default
    x_dtype=None,
):  # fmt: skip
    if not (scale is offset is x_dtype is None and row_idx_type == 0 and expert_tokens_num_type == 1):
        raise NotImplementedError("only counts and indices to gather by are emulated, without scales")
    choices, (start, end) = expert_idx.numel(), active_expert_range
    require(x.is_contiguous() and expert_idx.is_contiguous(), "contiguous tensors")
    require(expert_idx.dtype == torch.int32 and len(expert_idx) == len(x) > 0, "expert_idx is int32 [rows, k]")
    require(active_num in (-1, 0, choices) and drop_pad_mode == 0 and expert_tokens_num_flag, "no choice is dropped")
    require(quant_mode in (-1, 1), "quant_mode is -1 or 1")
    require(0 < expert_num <= 10240 and 0 <= start < end <= expert_num, "the experts are in 0 … expert_num")
    require(bool(((expert_idx >= 0) & (expert_idx < expert_num)).all()), "expert_idx is below expert_num")
    experts = expert_idx.flatten()
    order = experts.argsort(stable=True)
    order = order[(experts[order] >= start) & (experts[order] < end)]
    values, scales = stored(x) if quant_mode == 1 else (x, torch.full((len(x),), torch.nan))
    undefined = torch.nan if values.is_floating_point() else -128
    expanded, expanded_scale = values.new_full((choices, x.shape[1]), undefined), scales.new_full((choices,), torch.nan)
    tokens = order // expert_idx.shape[1]
    expanded[: len(order)], expanded_scale[: len(order)] = values[tokens], scales[tokens]
    row_idx = torch.full((choices,), -1, dtype=torch.int32)
    row_idx[order] = torch.arange(len(order), dtype=torch.int32)
    return expanded, row_idx, experts.long().bincount(minlength=expert_num)[start:end], expanded_scale


@emulates("npu::npu_grouped_matmul")
def npu_grouped_matmul(
    x, weight, *, bias=None, scale=None, offset=None, antiquant_scale=None, antiquant_offset=None,
    per_token_scale=None, group_list=None, activation_input=None, activation_quant_scale=None,
    activation_quant_offset=None, split_item=0, group_type=None, group_list_type=0, act_type=0, tuning_config=None,
    output_dtype=None, x_dtype=None, weight_dtype=None, scale_dtype=None, per_token_scale_dtype=None,
):  # fmt: skip
    """One x, one weight and one result, in groups of rows that group_list ends (type 0)."""
    if group_type != 0 or group_list_type != 0:
        raise NotImplementedError("only groups of rows by their ends are emulated")
    (x,), (weight,) = x, weight
    require(
        split_item in (2, 3) and x.dim() == 2 and weight.dim() == 3, "one x of two and one weight of three dimensions"
    )
    require(
        x.is_contiguous() and is_matrix(weight), "x is contiguous, weight is so too or the transpose of one that is"
    )
    require(x.dtype == weight.dtype and x.shape[1] == weight.shape[1], "x and weight fit")
    refuse(limits.grouped_matmul(len(weight), x.shape[1]))
    require(group_list.dtype == torch.int64 and group_list.shape == weight.shape[:1], "group_list is int64 [groups]")
    ends = group_list.tolist()
    require(sorted(ends) == ends and ends[0] >= 0 and ends[-1] == len(x), "group_list rises to the rows of x")
    if scale is None:
        require(per_token_scale is output_dtype is None and x.is_floating_point(), "unquantised x")
        groups = [x[start:end].float() @ w.float() for start, end, w in zip([0, *ends], ends, weight, strict=False)]
        if bias is not None:
            require(bias[0].dtype == limits.grouped_bias_dtype(x.dtype), "bias is fp16 for fp16, else fp32")
            require(bias[0].shape == (len(weight), weight.shape[2]), "bias is [groups, n]")
            groups = [group + b.float() for group, b in zip(groups, bias[0], strict=True)]
        return [torch.cat(groups).to(x.dtype)]
    (scale,), (tokens,), dtype = scale, per_token_scale, dtype_of(output_dtype)
    require(x.dtype == torch.int8 and bias is None, "int8 has scales, and no biases that are not int32")
    require(scale.dtype == limits.grouped_scale_dtype(dtype), "scale is bf16 for bf16, else fp32")
    require(scale.shape == (len(weight), weight.shape[2]) and scale.is_contiguous(), "scale is [groups, n]")
    require(tokens.dtype == torch.float32 and tokens.shape == x.shape[:1], "per_token_scale is fp32 [m]")
    groups = [
        exactly(x[start:end], w) * s.float() for start, end, w, s in zip([0, *ends], ends, weight, scale, strict=False)
    ]
    return [(torch.cat(groups) * tokens.unsqueeze(1)).to(dtype)]


@emulates("npu::npu_moe_finalize_routing")
def npu_moe_finalize_routing(
    expanded_permuted_rows, skip1, skip2, bias, scales, expanded_src_to_dst_row, export_for_source_row,
    drop_pad_mode=0, k=1,
):  # fmt: skip
    """Choice k of row i is at i + k * rows of the indices in mode 0, and at i * K + k in mode 2 (CANN)."""
    if not (skip1 is skip2 is bias is export_for_source_row is None):
        raise NotImplementedError("only the sum of an expert's rows is emulated")
    rows, index, modes = expanded_permuted_rows, expanded_src_to_dst_row, (limits.BY_COLUMNS, limits.BY_ROWS)
    require(drop_pad_mode in modes, "drop_pad_mode is 0 or 2")
    require(scales.dtype == rows.dtype and scales.numel() == len(rows), "scales are [rows, k], of the rows' dtype")
    require(index.dtype == torch.int32 and index.shape == (len(rows),), "indices are int32 [rows * k]")
    require(bool(((index >= 0) & (index < len(rows))).all()), "indices are of rows")
    by_row = index.view(scales.shape) if drop_pad_mode == limits.BY_ROWS else index.view(scales.shape[::-1]).t()
    total = rows[by_row.long()].float() * scales.float().unsqueeze(-1)
    return total.sum(1).to(rows.dtype)
