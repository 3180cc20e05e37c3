"""The capabilities of opset's attention, as vLLM queries them, and the layout of its KV cache.

The cache of a layer is [num_blocks, num_kv_heads, block_size, 2 * head_size]. The last dimension holds the key in its
first half and the value in its second half. vLLM chooses the order in memory, and every kernel uses the strides.
"""

from typing import ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf

from vllm_opset.attention.impl import OpsetAttentionImpl
from vllm_opset.attention.metadata import OpsetMetadataBuilder


class OpsetAttentionBackend(AttentionBackend):
    supported_dtypes: ClassVar = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]
    # vLLM makes one call for each layer, which writes the cache and attends.
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """The name of a member of vLLM's AttentionBackendEnum, in which vLLM looks it up."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[OpsetAttentionImpl]:
        return OpsetAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[OpsetMetadataBuilder]:
        return OpsetMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        """Any block size. vLLM passes the argument from 0.31 on."""
        return [MultipleOf(1)]

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Whether the tokens of an image may see each other (`attention/images.py`)."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple:
        """All layouts. The first keeps a head's tokens side by side, as kernels read them. vLLM asks from 0.29 on."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return tuple(sorted(KVCacheLayout, key=lambda layout: layout is not KVCacheLayout.LBHNC))

    # The same layout of the cache for vLLM up to 0.28.

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 2, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)
