"""qk_norm_rope_cache in one pass over the heads."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.cpp import _rope_cache
from vllm_opset.ops.norm.rms_norm import check_parameter
from vllm_opset.ops.rope._fused_rope import check_arguments


@kernel(ops.qk_norm_rope_cache, name="cpp", supports=_rope_cache.supports)
def qk_norm_rope_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    epsilon: float,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> None:
    check_arguments(query, key, value, positions, cos_sin_cache, kv_cache, slot_mapping)
    check_parameter(q_weight, query)
    check_parameter(k_weight, key)
    in_place = _rope_cache.reads_in_place(query, key, value, cos_sin_cache, kv_cache)
    if not in_place or q_weight.dtype != k_weight.dtype:
        return ops.qk_norm_rope_cache(
            query, key, value, q_weight, k_weight, epsilon, positions, cos_sin_cache, is_neox_style, kv_cache,
            slot_mapping, k_scale, v_scale, weight_offset,
        )  # fmt: skip
    _rope_cache.launch(
        query, key, value, positions, cos_sin_cache, is_neox_style, kv_cache, slot_mapping, q_weight, k_weight,
        epsilon, weight_offset,
    )  # fmt: skip
