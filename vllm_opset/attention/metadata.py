"""Metadata that all layers of a step share: the batch for ops.paged_attention, and the slots of the new tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

from vllm_opset.attention.images import ImageTokens, image_tokens
from vllm_opset.ops.attention.paged_batch import PACKED_BLOCK_SIZE, PagedBatch, packed_batch


@dataclass(slots=True)
class OpsetMetadata(AttentionMetadata):
    """The metadata of one step. slot_mapping: int64, a slot for every new token. images: None if there are none."""

    slot_mapping: torch.Tensor
    batch: PagedBatch
    images: ImageTokens | None = None


class OpsetMetadataBuilder(AttentionMetadataBuilder[OpsetMetadata]):
    # Kernels read values that change from step to step from tensors. The queries per request are part of the launch.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.encoder_only = isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)
        # On the host vLLM has seq_lens as an upper bound, as the name says. It is exact unless drafts are verified
        # (CommonAttentionMetadata, 0.26 to 0.33). vLLM derives builders from this one, for example for static sinks or
        # cross attention. Those change the batch on the device only.
        self.lengths_on_host = vllm_config.speculative_config is None and type(self) is OpsetMetadataBuilder
        # Whether a model that drafts several tokens may attend for each of them with the metadata of the first.
        self.supports_draft_decode_metadata_update = type(self) is OpsetMetadataBuilder
        block_size = PACKED_BLOCK_SIZE if self.encoder_only else kv_cache_spec.block_size
        causal = not getattr(kv_cache_spec, "non_causal", False)  # specifications of other kinds lack the field
        images = getattr(vllm_config.model_config, "is_mm_prefix_lm", False)
        layers = vllm_config.compilation_config.static_forward_context
        for name in layer_names:
            layers[name].impl.choose_kernels(kv_cache_spec.dtype, block_size, causal, images)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> OpsetMetadata:
        common = common_attn_metadata
        max_query_len = int(common.max_query_len)  # chunked local attention gives NumPy's integer, which is no int
        if self.encoder_only:
            batch = packed_batch(common.query_start_loc, max_query_len)
        else:
            batch = PagedBatch(
                query_start_loc=common.query_start_loc,
                seq_lens=common.seq_lens,
                block_table=common.block_table_tensor,
                max_query_len=max_query_len,
                max_seq_len=common.max_seq_len,
                causal=common.causal,
                query_start_loc_cpu=common.query_start_loc_cpu if self.lengths_on_host else None,
                seq_lens_cpu=common.seq_lens_cpu_upper_bound if self.lengths_on_host else None,
            )
        return OpsetMetadata(common.slot_mapping, batch, image_tokens(batch, common.mm_req_doc_ranges))

    def update_draft_decode_metadata(self, metadata: OpsetMetadata) -> None:
        """Forget what was computed from lengths that vLLM has changed in place for the next drafted token (0.33).

        The batch has views of vLLM's buffers. Kernels compute all else from them again, in a captured graph, too.
        """
        metadata.batch.forget()
