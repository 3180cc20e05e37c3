"""Faults that the parity suite must find: each changes the arguments of one operator that the kernels call.

A fault thus does not depend on the code of a kernel. The tests show that the emulation and the suite would find a
kernel with this fault.
"""

from collections.abc import Callable

import emulation
import pytest
import torch
from checks import KERNELS, by_name, run_checks
from emulation import Limits
from torch.utils._python_dispatch import TorchDispatchMode


def eps_for_epsilon(given: dict) -> dict:
    return {"eps": 1e-6}


def another_epsilon(given: dict) -> dict:
    return {"epsilon": 1e-5}


def weights_of_other_columns(given: dict) -> dict:
    return {"gamma": given["gamma"].roll(1)}


def halves_the_wrong_way_round(given: dict) -> dict:
    return {"input": torch.cat(given["input"].chunk(2, dim=-1)[::-1], dim=-1)}


def the_wrong_half_activated(given: dict) -> dict:
    return {"activate_left": not given.get("activate_left", False)}


def the_other_style_of_pairs(given: dict) -> dict:
    return {"rotary_mode": "interleave" if given.get("rotary_mode", "half") == "half" else "half"}


def the_other_style(given: dict) -> dict:
    return {"is_neox_style": not given["is_neox_style"]}


def int64_slots(given: dict) -> dict:
    return {"slot_indices": given["slot_indices"].long()}


def the_mode_of_nz_caches(given: dict) -> dict:
    return {"cache_mode": "PA_NZ"}


def other_slots(given: dict) -> dict:
    return {"slot_mapping": given["slot_mapping"].flip(0)}


def no_mask(given: dict) -> dict:
    return {"sparse_mode": 0, "atten_mask": None}


def pre_tokens_off_by_one(given: dict) -> dict:
    return {"pre_tokens": given["pre_tokens"] + 1} if "pre_tokens" in given else {}


def strided_keys_and_values(given: dict) -> dict:
    return {name: torch.cat((given[name],) * 2, dim=-1).chunk(2, dim=-1)[0] for name in ("key", "value")}


def one_key_too_few(given: dict) -> dict:
    return {"actual_seq_lengths_kv": [max(0, length - 1) for length in given["actual_seq_lengths_kv"]]}


def one_key_too_few_for_atb(given: dict) -> dict:
    return {"context_lens": (given["context_lens"] - 1).clamp(min=1)}


def int64_lengths(given: dict) -> dict:
    return {"context_lens": given["context_lens"].long()}


def strided_caches(given: dict) -> dict:
    return {name: torch.cat((given[name],) * 2, dim=-1).chunk(2, dim=-1)[0] for name in ("key_cache", "value_cache")}


def pages_of_other_requests(given: dict) -> dict:
    return {"block_table": given["block_table"].roll(1, dims=0)}


def one_token_too_many(given: dict) -> dict:
    return {} if given.get("k") is None else {"k": (given["k"] + 1).clamp(max=given["logits"].shape[1])}


def groups_that_end_early(given: dict) -> dict:
    return {"group_list": (given["group_list"] - 1).clamp(min=0)}


def experts_of_others(given: dict) -> dict:
    return {"weight": [given["weight"][0].roll(1, dims=0)]}


def scales_of_other_tokens(given: dict) -> dict:
    return {name: [x.roll(1, dims=0) for x in given[name]] for name in ("per_token_scale",) if given.get(name)}


def scales_in_fp32(given: dict) -> dict:
    return {"scale": [x.float() for x in given["scale"]]} if given.get("scale") else {}


def indices_by_rows(given: dict) -> dict:
    return {"drop_pad_mode": 2}


def weights_of_other_choices(given: dict) -> dict:
    return {"scales": given["scales"].flip(0)}


def rows_before_those_of_the_choices(given: dict) -> dict:
    return {"expanded_src_to_dst_row": given["expanded_src_to_dst_row"] - 1}


def all_experts_active(given: dict) -> dict:
    return {"active_expert_range": [0, given["expert_num"]]}


def another_choice(given: dict) -> dict:
    return {"x": given["x"].roll(1, dims=1)}


def a_softmax(given: dict) -> dict:
    return {"norm_type": 0} if given.get("norm_type") else {}


def groups_by_their_largest(given: dict) -> dict:
    return {"group_select_mode": 0} if given.get("group_select_mode") and given.get("group_count", 1) > 1 else {}


def no_scores(given: dict) -> dict:
    return {"out_flag": False} if given.get("out_flag") else {}


def other_tokens_scales(given: dict) -> dict:
    return {"pertoken_scale": given["pertoken_scale"].flip(0)}


def no_bias(given: dict) -> dict:
    return {} if given.get("bias") is None else {"bias": None}


def the_weight_as_it_is(given: dict) -> dict:
    return {"x2": given["x2"].t()}


def halves_of_the_values(given: dict) -> dict:
    return {"input": given["input"] / 2}


FUSED_ATTENTION = "npu::npu_fused_infer_attention_score"
ATB_ATTENTION = "atb::_npu_paged_attention"
GATING = "npu::npu_moe_gating_top_k"
FAULTS = [
    ("rms_norm", "npu::npu_rms_norm", eps_for_epsilon),
    ("rms_norm", "npu::npu_rms_norm", another_epsilon),
    ("rms_norm", "npu::npu_rms_norm", weights_of_other_columns),
    ("fused_add_rms_norm", "npu::npu_add_rms_norm", another_epsilon),
    ("fused_add_rms_norm", "npu::npu_add_rms_norm", weights_of_other_columns),
    ("silu_and_mul", "npu::npu_swiglu", halves_the_wrong_way_round),
    ("gelu_and_mul", "npu::npu_geglu", the_wrong_half_activated),
    ("rotary_embedding", "npu::npu_mrope", the_other_style_of_pairs),
    ("rotary_embedding", "npu::npu_rotary_mul", the_other_style_of_pairs),
    ("rotary_embedding", "atb::_npu_rotary_embedding", the_other_style),
    ("reshape_and_cache", "atb::_npu_reshape_and_cache", int64_slots),
    ("reshape_and_cache", "npu::npu_scatter_pa_kv_cache", the_mode_of_nz_caches),
    ("reshape_and_cache", "npu::npu_scatter_pa_kv_cache", other_slots),
    ("paged_attention", FUSED_ATTENTION, no_mask),
    ("paged_attention", FUSED_ATTENTION, pre_tokens_off_by_one),
    ("paged_attention", FUSED_ATTENTION, strided_keys_and_values),
    ("paged_attention", FUSED_ATTENTION, one_key_too_few),
    ("paged_attention", FUSED_ATTENTION, pages_of_other_requests),
    ("paged_attention", ATB_ATTENTION, one_key_too_few_for_atb),
    ("paged_attention", ATB_ATTENTION, int64_lengths),
    ("paged_attention", ATB_ATTENTION, strided_caches),
    ("paged_attention", ATB_ATTENTION, pages_of_other_requests),
    ("top_k_top_p_sample", "npu::npu_top_k_top_p", one_token_too_many),
    ("route", "npu::npu_moe_gating_top_k_softmax", another_choice),
    ("route", GATING, another_choice),
    ("route", GATING, a_softmax),
    ("route", GATING, groups_by_their_largest),
    ("route", GATING, no_scores),
    ("fused_experts", "npu::npu_moe_init_routing_v2", all_experts_active),
    ("fused_experts", "npu::npu_grouped_matmul", groups_that_end_early),
    ("fused_experts", "npu::npu_grouped_matmul", experts_of_others),
    ("fused_experts", "npu::npu_grouped_matmul", scales_of_other_tokens),
    ("fused_experts", "npu::npu_grouped_matmul", scales_in_fp32),
    ("fused_experts", "npu::npu_moe_finalize_routing", indices_by_rows),
    ("fused_experts", "npu::npu_moe_finalize_routing", weights_of_other_choices),
    ("fused_experts", "npu::npu_moe_finalize_routing", rows_before_those_of_the_choices),
    ("quantise", "npu::npu_dynamic_quant", halves_of_the_values),
    ("linear", "npu::npu_quant_matmul", other_tokens_scales),
    ("linear", "npu::npu_quant_matmul", no_bias),
    ("linear", "npu::npu_quant_matmul", the_weight_as_it_is),
]


class Faulty(TorchDispatchMode):
    """Changes the arguments of every call of one operator."""

    def __init__(self, operator: str, change: Callable[[dict], dict]) -> None:
        super().__init__()
        self.operator, self.change, self.met = operator, change, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name != self.operator:
            return func(*args, **(kwargs or {}))
        given = by_name(func, args, kwargs)
        changed = self.change(given)
        self.met |= bool(changed)
        return func(**given | changed)


@pytest.mark.parametrize(
    ("op_name", "operator", "change"), FAULTS, ids=[f"{operator}-{change.__name__}" for _, operator, change in FAULTS]
)
def test_a_fault_is_found(op_name, operator, change):
    calling = 0
    for op, kernel in KERNELS:
        if op.name == op_name:
            with emulation.mode(Limits.STRICT), Faulty(operator, change) as faulty:
                found = any(check.failure for check in run_checks(op, kernel, Limits.STRICT))
            assert found or not faulty.met, f"{kernel} passes"
            calling += faulty.met
    assert calling, f"no kernel of {op_name} calls {operator}: take this fault out"
