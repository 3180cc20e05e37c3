"""rotary_embedding in one pass over the heads."""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.cpp._build import INT, POINTER, function
from vllm_opset.kernels.cpp._types import TYPES, supports_type
from vllm_opset.kernels.cpu import rotary_embedding as in_torch
from vllm_opset.ops.rope.rotary_embedding import check_arguments

run = function("rotary_embedding", INT, INT, POINTER, POINTER, POINTER, *[INT] * 7, returns=INT)


@kernel(ops.rotary_embedding, name="cpp", supports=supports_type)
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool = True,
) -> None:
    in_one_piece = cos_sin_cache.is_contiguous() and query.stride(-1) == 1 and (key is None or key.stride(-1) == 1)
    if not in_one_piece or cos_sin_cache.dtype not in TYPES:
        in_torch.rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox_style)
        return
    rotary_dim = check_arguments(positions, query, key, head_size, cos_sin_cache)
    positions = positions.to(torch.int64).contiguous()
    table_type, at, table = TYPES[cos_sin_cache.dtype], positions.data_ptr(), cos_sin_cache.data_ptr()
    for x in (query, key):
        if x is not None:
            tokens, width = x.shape[:2]
            heads, x_head = (width // head_size, head_size) if x.ndim == 2 else (width, x.stride(1))
            lost = run(
                TYPES[x.dtype], table_type, x.data_ptr(), at, table, len(cos_sin_cache),
                tokens, heads, x.stride(0), x_head, rotary_dim // 2, is_neox_style,
            )  # fmt: skip
            if lost >= 0:
                raise IndexError(f"position {positions[lost]} of token {lost} is not one of {len(cos_sin_cache)}")
