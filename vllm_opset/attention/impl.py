"""The attention implementation of one layer."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from vllm_opset import ops, selection
from vllm_opset.attention.images import ImageTokens
from vllm_opset.attention.metadata import OpsetMetadata
from vllm_opset.ops.attention.paged_batch import PagedBatch, packed_cache
from vllm_opset.ops.schemes import FP8
from vllm_opset.unsupported import ANOTHER_MODEL, Refusal

NO_LIMIT = -1  # for one side of a window, in ops.paged_attention
NO_CHUNKS = -1  # vLLM's chunk_lookback of a layer that does not attend in chunks


class Deferred(Protocol):
    """Work on query and key that a kernel does together with writing the cache."""

    def cache_write(self, **problem) -> Callable[..., None]:
        """The function to call with query, key, value, kv_cache and slot_mapping. problem: fields the layer knows."""


class OpsetAttentionImpl(AttentionImpl[OpsetMetadata]):
    """The attention of a layer. vLLM passes the arguments up to `kv_sharing_target_layer_name` by position.

    split_kv_layout: whether the platform's caches have separate dimensions for keys and values (`ops.paged_batch`).
    """

    split_kv_layout = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        chunk_lookback: int = NO_CHUNKS,
    ) -> None:
        if chunk_lookback != NO_CHUNKS:  # vLLM 0.33 asks its own Triton backend alone, and would raise before
            raise Refusal(
                f"vllm-opset does not support attention in chunks that look back (chunk_lookback={chunk_lookback}): "
                f"{ANOTHER_MODEL}."
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.window = _window(sliding_window, attn_type)
        self.kv_cache_dtype = kv_cache_dtype
        self.caches_fp8 = kv_cache_dtype.startswith("fp8") and attn_type == AttentionType.DECODER
        self.soft_cap = logits_soft_cap or 0.0
        self.attn_type = attn_type
        self.writes_cache = kv_sharing_target_layer_name is None
        self.sinks = sinks
        self.dtype = torch.get_default_dtype()
        self.attends_within_images = False
        # What is to be done to query and key together with writing the cache (model/fusion.py).
        self.deferred: Deferred | None = None

    def choose_kernels(
        self, kv_cache_dtype: torch.dtype, block_size: int, causal: bool = True, images: bool = False
    ) -> None:
        """Choose kernels once the cache's geometry is known, before the first step.

        kv_cache_dtype: uint8 means fp8. causal: False for a prefix LM, in whose prompts each token sees all others.
        images: whether the tokens of an image see each other.
        """
        if self.attn_type == AttentionType.ENCODER_ONLY:
            kv_cache_dtype = self.dtype  # vLLM gives that of the caches, and an encoder has none
        cache = {
            "device": current_platform.device_type,
            "dtype": self.dtype,
            "kv_cache_dtype": FP8 if self.caches_fp8 else kv_cache_dtype,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "block_size": block_size,
        }
        split_kv_layout = self.split_kv_layout and self.attn_type == AttentionType.DECODER
        self.cache_problem = ops.reshape_and_cache.problem(**cache, split_kv_layout=split_kv_layout)
        if self.deferred is None:
            write = selection.select(ops.reshape_and_cache, self.cache_problem).run
            self._write = lambda query, *rest, **scales: write(*rest, **scales)
        else:
            self._write = self.deferred.cache_write(**cache, num_heads=self.num_heads)
        self.problem = ops.paged_attention.problem(
            **cache,
            num_heads=self.num_heads,
            window=self.window,
            soft_cap=self.soft_cap > 0,
            alibi=self.alibi_slopes is not None,
            sinks=self.sinks is not None,
            causal=causal and self.attn_type == AttentionType.DECODER,
            split_kv_layout=split_kv_layout,
        )
        choice = selection.select(ops.paged_attention, self.problem)
        self.variants = choice.kernel.variants
        options = {
            "scale": self.scale,
            "soft_cap": self.soft_cap,
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
        }
        self._attend = partial(choice.run, window=self.window, **options)
        self.attends_within_images = images and self.attn_type == AttentionType.DECODER
        if self.attends_within_images:
            window = None if self.window is None else (self.window - 1, NO_LIMIT)
            choice = selection.select(ops.paged_attention, replace(self.problem, window=window, causal=False))
            self._attend_within_images = partial(choice.run, window=window, **options)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: OpsetMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the cache and attend.

        query, output: [num_tokens, num_heads, head_size]. key, value: [num_tokens, num_kv_heads, head_size].
        attn_metadata is None while vLLM only measures memory: there is no cache yet.
        """
        if attn_metadata is None:
            return output.fill_(0)
        if self.attn_type == AttentionType.ENCODER_ONLY:
            kv_cache = packed_cache(key, value)
        elif self.writes_cache and key is not None:
            kv_cache, scales = self._stored(layer, kv_cache)
            self._write(query, key, value, kv_cache, attn_metadata.slot_mapping, **scales)
        self.attend(layer, query, kv_cache, attn_metadata.batch, output)
        if attn_metadata.images is not None:
            self.attend_within_images(layer, query, kv_cache, attn_metadata.images, output)
        return output

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write keys and values as they are. Models that draft by DFlash and DSpark call it for the target's tokens.

        key, value: [num_tokens, num_kv_heads, head_size]. slot_mapping: int64 [num_tokens].
        """
        kv_cache, scales = self._stored(layer, kv_cache)
        write = selection.select(ops.reshape_and_cache, self.cache_problem).run
        write(key, value, kv_cache, slot_mapping, **scales)

    def attend(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: PagedBatch,
        output: torch.Tensor,
    ) -> None:
        """Attend after the cache is written, as the second half of `forward`."""
        kv_cache, scales = self._stored(layer, kv_cache)
        self._attend(query, kv_cache, batch, output, **scales)

    def attend_within_images(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        images: ImageTokens,
        output: torch.Tensor,
    ) -> None:
        """Attend again for the tokens of images, which also see the rest of their image."""
        kv_cache, scales = self._stored(layer, kv_cache)
        of_images = query[images.rows]
        attended = torch.empty_like(of_images)
        self._attend_within_images(of_images, kv_cache, images.batch, attended, **scales)
        output[images.rows] = attended

    def able(self, layer: torch.nn.Module, query: torch.Tensor, kv_cache: torch.Tensor, batch: PagedBatch) -> list[str]:
        """The variants of the attention's kernel that can run such a step."""
        kv_cache, scales = self._stored(layer, kv_cache)
        call = self.variants.describe(query, kv_cache, batch, query, **self._attend.keywords, **scales)
        return self.variants.able(call)

    def _stored(self, layer: torch.nn.Module, kv_cache: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The cache in the dtype that it holds, and the scales of an fp8 cache, which vLLM keeps in the layer."""
        if not self.caches_fp8:
            return kv_cache, {}
        return kv_cache.view(FP8), {"k_scale": layer._k_scale, "v_scale": layer._v_scale}


def _window(sliding_window: int | None, attn_type: str) -> int | tuple[int, int] | None:
    """The window of ops.paged_attention, which for an encoder reaches as far to the right as to the left."""
    if sliding_window is None or attn_type == AttentionType.DECODER:
        return sliding_window
    return sliding_window - 1, sliding_window - 1
