"""rope_cache in one pass over the heads."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.cpp import _rope_cache
from vllm_opset.ops.rope._fused_rope import check_arguments


@kernel(ops.rope_cache, name="cpp", supports=_rope_cache.supports)
def rope_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    check_arguments(query, key, value, positions, cos_sin_cache, kv_cache, slot_mapping)
    if not _rope_cache.reads_in_place(query, key, value, cos_sin_cache, kv_cache):
        return ops.rope_cache(
            query, key, value, positions, cos_sin_cache, is_neox_style, kv_cache, slot_mapping, k_scale, v_scale
        )
    _rope_cache.launch(query, key, value, positions, cos_sin_cache, is_neox_style, kv_cache, slot_mapping)
