"""The function of the library that rope_cache and qk_norm_rope_cache share."""

import ctypes
import functools

import torch

from vllm_opset.kernels.cpp._build import FLOAT, INT, POINTER, function
from vllm_opset.kernels.cpp._types import TYPES, supports_type, type_and_address
from vllm_opset.ops.rope._fused_rope import FusedRopeProblem

run = function("rope_cache", *[POINTER] * 7, INT, INT, returns=INT)


class Layer(ctypes.Structure):
    """The struct `Layer` of rope_cache.cpp."""

    _fields_ = (
        *((name, INT) for name in ("type", "weight_type", "table_type", "heads", "kv_heads", "size", "half", "neox")),
        *((name, INT) for name in ("query_token", "query_head", "key_token", "key_head", "value_token", "value_head")),
        *((name, INT) for name in ("table_rows", "num_slots", "block_size", "cache_block", "cache_head", "cache_slot")),
        *((name, FLOAT) for name in ("epsilon", "offset")),
        *((name, POINTER) for name in ("q_weight", "k_weight", "table")),
    )


def supports(problem: FusedRopeProblem) -> str | None:
    """fp32 and bf16, and a cache of the same; weights of norms in either."""
    if problem.kv_cache_dtype != problem.dtype:
        return f"not built for {problem.dtype} with a cache in {problem.kv_cache_dtype}"
    if problem.weight_dtype not in (None, *TYPES):
        return f"not built for weights in {problem.weight_dtype}"
    return supports_type(problem)


def reads_in_place(query, key, value, cos_sin_cache, kv_cache) -> bool:
    """Whether the library can read and write these tensors where they are."""
    one_dtype = query.dtype == key.dtype == value.dtype == kv_cache.dtype
    dense = query.stride(2) == key.stride(2) == value.stride(2) == kv_cache.stride(3) == 1
    return one_dtype and dense and cos_sin_cache.dtype in TYPES and cos_sin_cache.is_contiguous()


def launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    epsilon: float = 0.0,
    weight_offset: float = 0.0,
) -> None:
    """One pass over the tokens. The arguments are those of qk_norm_rope_cache; without weights there are no norms.

    Raises IndexError for a position that the table does not have, and for a slot that the cache does not have.
    """
    positions, slots = positions.to(torch.int64).contiguous(), slot_mapping.to(torch.int64).contiguous()
    num_tokens = positions.shape[0]
    weight_type, q_address = type_and_address(q_weight)
    layer = _layer(
        TYPES[query.dtype], weight_type, TYPES[cos_sin_cache.dtype], query.shape[1:], kv_cache.shape,
        cos_sin_cache.shape, is_neox_style, query.stride(), key.stride(), value.stride(), kv_cache.stride(), epsilon,
        weight_offset, q_address, type_and_address(k_weight)[1], cos_sin_cache.data_ptr(),
    )  # fmt: skip
    lost = run(
        ctypes.byref(layer), query.data_ptr(), key.data_ptr(), value.data_ptr(), kv_cache.data_ptr(),
        positions.data_ptr(), slots.data_ptr(), num_tokens, slots.shape[0],
    )  # fmt: skip
    if 0 <= lost < num_tokens:
        raise IndexError(f"position {positions[lost]} of token {lost} is not one of {len(cos_sin_cache)}")
    if lost >= num_tokens:
        token = lost - num_tokens
        raise IndexError(f"slot {slots[token]} of token {token} is not one of {layer.num_slots}")


# A model has as many of these structs as layers, for each width of a step's projection.
@functools.lru_cache(maxsize=1024)
def _layer(
    dtype, weight_dtype, table_dtype, heads, cache, table, neox, query_stride, key_stride, value_stride, cache_stride,
    epsilon, offset, q_weight, k_weight, table_address,
) -> Layer:  # fmt: skip
    (num_heads, head_size), (num_blocks, num_kv_heads, block_size, _), (rows, rotary_dim) = heads, cache, table
    return Layer(
        dtype, weight_dtype, table_dtype, num_heads, num_kv_heads, head_size, rotary_dim // 2, neox,
        *query_stride[:2], *key_stride[:2], *value_stride[:2], rows, num_blocks * block_size, block_size,
        *cache_stride[:3], epsilon, offset, q_weight, k_weight, table_address,
    )  # fmt: skip
