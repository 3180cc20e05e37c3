"""Rotary embedding, the query and key norms before it, and the cache write after it, in one launch.

vLLM's models call these parts one after the other: q_norm and k_norm if the model has them, rotary_emb, attn. Without a
compiler they can be fused only if the first parts are deferred to the last one. So this module changes a model after it
is loaded. The norms and the rotary embedding before an attention layer then leave query and key unchanged, and the
positions are kept. The cache write of the attention layer does all the work (`ops.qk_norm_rope_cache`,
`ops.rope_cache`).

This only works if the model's code goes from its projection through exactly these parts to its attention. That is not
read from the source. Each layer is instead run twice on random input: as it is, and with the parts deferred.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.forward_context import BatchDescriptor, get_forward_context, is_forward_context_available
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType

from vllm_opset import ops, selection
from vllm_opset.attention.impl import FP8, OpsetAttentionImpl
from vllm_opset.model.layers import RMSNormLayer, RotaryEmbeddingLayer
from vllm_opset.model.weights import offloads
from vllm_opset.ops.contract import Op
from vllm_opset.ops.rope._fused_rope import FusedRopeProblem

TRIED_POSITIONS = (3, 0, 7, 12, 1)


class DeferredRotaryEmbedding(nn.Module):
    """Stand-in for a rotary embedding that leaves query and key unchanged and keeps the positions.

    Layers share the rotary embedding that it replaces. To the attention's implementation it is an
    `attention.impl.Deferred`: the remaining work on query and key.
    positions: by the key that `_pieces` returns, because `forward` does not run when a piecewise graph is replayed.
    """

    def __init__(self, rotary: RotaryEmbeddingLayer, norms: tuple[RMSNormLayer, RMSNormLayer] | None) -> None:
        super().__init__()
        self.rotary = rotary
        self.norms = norms  # in a tuple, so that they do not become this module's children: they belong to the model
        self.positions: dict[BatchDescriptor | None, torch.Tensor] = {}

    def forward(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor):
        self.positions[_pieces()] = positions
        return query, key

    def current_positions(self) -> torch.Tensor:
        """The positions of the current step. They lie at the address they had when its pieces were captured."""
        return self.positions[_pieces()]

    def problem(self, **problem) -> tuple[Op, FusedRopeProblem]:
        """The op that does the work, and its problem. problem: the fields that the attention's layer knows."""
        problem |= {"rotary_dim": self.rotary.rotary_dim, "is_neox_style": self.rotary.is_neox_style}
        if self.norms is None:
            return ops.rope_cache, FusedRopeProblem(**problem)
        return ops.qk_norm_rope_cache, FusedRopeProblem(**problem, weight_dtype=self.norms[0].weight.dtype)

    def cache_write(self, *, block_size: int, **problem) -> Callable[..., None]:
        """See `attention.impl.Deferred`."""
        table, neox = self.rotary.cos_sin_cache, self.rotary.is_neox_style
        parameters, offset = (), {}
        if self.norms is not None:
            q_norm, k_norm = self.norms
            parameters = q_norm.weight, k_norm.weight, q_norm.variance_epsilon
            offset = {"weight_offset": q_norm.weight_offset}
        run = selection.select(*self.problem(**problem)).run

        def write(query, key, value, kv_cache, slot_mapping, **scales) -> None:
            positions = self.current_positions()
            run(query, key, value, *parameters, positions, table, neox, kv_cache, slot_mapping, **scales, **offset)

        return write


def _pieces() -> BatchDescriptor | None:
    """The batch whose piecewise graphs this step replays; None if it replays a full graph or no graph."""
    if not is_forward_context_available():
        return None
    context = get_forward_context()
    return context.batch_descriptor if context.cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE else None


def bind(
    model: nn.Module,
    vllm_config: VllmConfig,
    precompile: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Fuse the parts in each layer of a model that was just loaded, if the model runs them together.

    precompile: makes a context in which a call of a kernel may compile it instead of launching it.
    """
    if not runs_together(vllm_config):
        return
    compiled: set[tuple] = set()
    for module in model.modules():
        rope = _rope_of(module)
        if rope is None:
            continue
        impl = module.attn.impl
        shape = type(module), impl.num_heads, impl.num_kv_heads, impl.head_size, rope.norms is None
        if shape not in compiled:
            with precompile():
                _can_be_deferred(module, rope, vllm_config)
            compiled.add(shape)
        # Every layer is tried, because in some models not all layers have a rotary embedding.
        if _can_be_deferred(module, rope, vllm_config):
            _defer(module, rope)
            impl.deferred = rope


def runs_together(vllm_config: VllmConfig) -> bool:
    """Whether a layer's parts run together in every step, on weights that are present once the model is loaded."""
    return vllm_config.compilation_config.mode == CompilationMode.NONE and not offloads(vllm_config)


def _rope_of(module: nn.Module) -> DeferredRotaryEmbedding | None:
    """The stand-in for the parts before the attention of this module; None if the module does not have such parts."""
    children = dict(module.named_children())
    attention, rotary = children.get("attn"), children.get("rotary_emb")
    if not isinstance(attention, Attention) or not isinstance(attention.impl, OpsetAttentionImpl):
        return None
    # A class with a forward of its own may take more than `_Recorder` takes.
    if type(attention).forward is not Attention.forward:
        return None
    # An encoder's attention writes no cache. With calculate_kv_scales (up to 0.27), vLLM computes the scales of a
    # cache before the cache is written.
    if attention.impl.attn_type != AttentionType.DECODER or getattr(attention, "calculate_kv_scales", False):
        return None
    # Only this class is accepted, because the forward of a derived class takes more than positions.
    if getattr(type(rotary), "forward_oot", None) is not RotaryEmbeddingLayer.forward_oot:
        return None
    norms = children.get("q_norm"), children.get("k_norm")
    if norms != (None, None) and not _are_of_a_head(norms, attention.impl.head_size):
        return None
    if not attention.impl.writes_cache:
        return None
    rope = DeferredRotaryEmbedding(rotary, norms if norms[0] else None)
    return rope if _has_kernel(rope, attention.impl) else None


def _has_kernel(rope: DeferredRotaryEmbedding, impl: OpsetAttentionImpl) -> bool:
    """Whether a kernel does the work in one pass. The reference would be slower than the kernels of the parts."""
    op, problem = rope.problem(
        device=current_platform.device_type,
        dtype=impl.dtype,
        kv_cache_dtype=FP8 if impl.caches_fp8 else impl.dtype,
        num_heads=impl.num_heads,
        num_kv_heads=impl.num_kv_heads,
        head_size=impl.head_size,
    )
    return selection.why_no_kernel(op, problem) is None


def _are_of_a_head(norms: tuple, head_size: int) -> bool:
    return (
        all(isinstance(norm, RMSNormLayer) and norm.opset_is_wanted for norm in norms)
        and all(norm._parameters.get("weight") is not None and len(norm.weight) == head_size for norm in norms)
        and norms[0].variance_epsilon == norms[1].variance_epsilon
    )


def _defer(module: nn.Module, rope: DeferredRotaryEmbedding) -> None:
    module.rotary_emb = rope
    for norm in rope.norms or ():
        norm.forward = _unchanged


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


class _Recorder(nn.Module):
    """Stand-in for an attention layer that keeps the query, key and value it receives.

    It takes the arguments of `Attention.forward`, and returns zeros of the same shape and dtype.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output_shape: torch.Size | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        self.received = query.clone(), key.clone(), value.clone()
        width = self.width if output_shape is None else output_shape[-1]
        return query.new_zeros(len(query), width, dtype=output_dtype)


@torch.inference_mode()
def _can_be_deferred(module: nn.Module, rope: DeferredRotaryEmbedding, vllm_config: VllmConfig) -> bool:
    """Whether query, key and value are the same if the parts run after the module's code instead of within it."""
    parameters = inspect.signature(module.forward).parameters.values()
    required = {p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    if required != {"positions", "hidden_states"} or not hasattr(module, "qkv_proj"):
        return False
    impl, device = module.attn.impl, rope.rotary.cos_sin_cache.device
    positions = torch.tensor(TRIED_POSITIONS, device=device)
    shape, generator = (len(positions), module.qkv_proj.input_size), torch.Generator(device).manual_seed(0)
    hidden = torch.randn(shape, dtype=vllm_config.model_config.dtype, device=device, generator=generator)
    with set_current_vllm_config(vllm_config), _restored(module, rope):
        module.attn = seen = _Recorder(impl.num_heads * impl.head_size)
        module(positions=positions, hidden_states=hidden)
        expected = seen.received
        _defer(module, rope)
        module(positions=positions, hidden_states=hidden)
        query, key, value = seen.received
    if rope.norms is not None:
        by_head = (x.unflatten(-1, (-1, impl.head_size)) for x in (query, key))
        query, key = (norm(x).flatten(-2) for norm, x in zip(rope.norms, by_head, strict=True))
    query, key = rope.rotary(positions, query, key)
    rope.positions.clear()
    return all(map(torch.equal, (query, key, value), expected))


@contextmanager
def _restored(module: nn.Module, rope: DeferredRotaryEmbedding) -> Iterator[None]:
    """Restore the module at the end of the context."""
    attention = module.attn
    try:
        yield
    finally:
        module.attn, module.rotary_emb = attention, rope.rotary
        for norm in rope.norms or ():
            norm.forward = norm._forward_method
