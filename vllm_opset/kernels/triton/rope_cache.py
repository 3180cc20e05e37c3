"""rope_cache, by the launch that it shares with qk_norm_rope_cache."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _rope_cache, _supports
from vllm_opset.ops.rope._fused_rope import check_arguments


@kernel(ops.rope_cache, name="triton", supports=_supports.kv_cache)
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
    _rope_cache.launch(
        query, key, value, _rope_cache.Norms(), positions, cos_sin_cache, is_neox_style, kv_cache, slot_mapping,
        k_scale, v_scale,
    )  # fmt: skip
