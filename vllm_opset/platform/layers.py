"""opset's versions of vLLM's layers, and their registration as out-of-tree replacements.

Each is a subclass of the layer that it replaces, keeps its weights, its name in `custom_ops` flags and its fallback for
what the op's contract does not cover, and calls the chosen kernel with as little in between as possible.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from vllm_opset import ops, selection
from vllm_opset.ops.contract import Op

VLLM = "vllm.model_executor.layers"
HW_AGNOSTIC = "vllm.model_executor.hw_agnostic.layers"
REGISTRY = "vllm.model_executor.custom_op"
HW_AGNOSTIC_REGISTRY = "vllm.model_executor.hw_agnostic.custom_op"


class OpsetLayer:
    """Mixed in before a vLLM layer.

    Kernels are chosen when the layer is built, and again when a model that holds it was loaded: vLLM shares some layers
    between the engines of a process.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.bind(torch.get_default_dtype())

    def bind(self, dtype: torch.dtype) -> None:
        """Makes the chosen kernels this layer's forward, within vLLM's configuration. dtype: of the activations."""
        # Not where the user or a compiler has switched the layer off (`custom_ops=["-rms_norm"]`).
        self.opset_is_wanted = (self._enforce_enable or self.enabled()) and self.covered_by_contract()
        self._forward_method = self.choose_kernels(dtype) if self.opset_is_wanted else self.forward_native
        # nn.Module calls `forward`: vLLM's would only pass the call on.
        self.forward = self._forward_method

    def covered_by_contract(self) -> bool:
        """Whether the op's contract can express this layer; if not, vLLM's own code runs."""
        return True

    def choose_kernels(self, dtype: torch.dtype) -> Callable:
        """The function to run as this layer's forward."""
        raise NotImplementedError


class RMSNormLayer(OpsetLayer):
    """For RMSNorm and GemmaRMSNorm, which differ in what is added to the weight."""

    weight_offset = 0.0

    def covered_by_contract(self) -> bool:
        return getattr(self, "variance_size_override", None) is None

    def choose_kernels(self, dtype: torch.dtype) -> Callable:
        known = {"hidden_size": len(self.weight), "weight_dtype": _dtype(self._parameters.get("weight"))}
        self._norm = _run(ops.rms_norm, dtype, **known)
        self._add_and_norm = _run(ops.fused_add_rms_norm, dtype, **known)
        return self.forward_oot

    def forward_oot(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        # Not self.weight: nn.Module finds parameters by a detour.
        weight = self._parameters.get("weight")
        if residual is None:
            return self._norm(x, weight, self.variance_epsilon, self.weight_offset)
        self._add_and_norm(x, residual, weight, self.variance_epsilon, self.weight_offset)
        return x, residual


class GemmaRMSNormLayer(RMSNormLayer):
    weight_offset = 1.0


class LayerNormLayer(OpsetLayer):
    def choose_kernels(self, dtype: torch.dtype) -> Callable:
        known = {"hidden_size": self.normalized_shape[0], "weight_dtype": _dtype(self.weight)}
        self._norm = _run(ops.layer_norm, dtype, **known)
        return self.forward_oot

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x, self._parameters.get("weight"), self._parameters.get("bias"), self.eps)


class RotaryEmbeddingLayer(OpsetLayer):
    """For every class that only computes its table of cosines and sines differently."""

    def choose_kernels(self, dtype: torch.dtype) -> Callable:
        known = {"head_size": self.head_size, "rotary_dim": self.rotary_dim, "is_neox_style": self.is_neox_style}
        self._rotate = _run(ops.rotary_embedding, dtype, **known, table_dtype=self.cos_sin_cache.dtype)
        return self.forward_oot

    def forward_oot(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None):
        self._rotate(positions, query, key, self.head_size, self._buffers["cos_sin_cache"], self.is_neox_style)
        return query, key


class MRotaryEmbeddingLayer(RotaryEmbeddingLayer):
    """Positions of a multimodal model have three components, of which each serves a section of the rotated pairs."""

    def forward_oot(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None, offsets=None):
        if positions.ndim == 1:
            return super().forward_oot(positions, query, key)
        table = torch.cat([self._by_section(half) for half in self.cos_sin_cache[positions].chunk(2, dim=-1)], dim=-1)
        rows = torch.arange(len(table), device=table.device)
        self._rotate(rows, query, key, self.head_size, table, self.is_neox_style)
        return query, key

    def _by_section(self, half: torch.Tensor) -> torch.Tensor:
        """[3, num_tokens, rotary_dim // 2] -> [num_tokens, rotary_dim // 2]"""
        if self.mrope_interleaved:
            from vllm.model_executor.layers.rotary_embedding.mrope import apply_interleaved_rope

            return apply_interleaved_rope(half, self.mrope_section)
        sections = half.split(self.mrope_section, dim=-1)
        return torch.cat([section[i] for i, section in enumerate(sections)], dim=-1)


def activation(op: Op, **attributes: str) -> type[OpsetLayer]:
    """A layer class for an activation. attributes: from the op's further arguments to attributes of vLLM's layer."""

    class ActivationLayer(OpsetLayer):
        def choose_kernels(self, dtype: torch.dtype) -> Callable:
            run = _run(op, dtype)
            arguments = {argument: getattr(self, name) for argument, name in attributes.items()}
            return partial(run, **arguments) if arguments else run

        def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
            """Stands for being enabled; the kernel itself is called."""
            return self._forward_method(x)

    return ActivationLayer


@dataclass(frozen=True)
class Replacement:
    """`cls` of `module` is replaced by `layer` on top of it. since: why a release may lack it; None if all have it."""

    module: str
    cls: str
    layer: type[OpsetLayer]
    since: str | None = None


REPLACEMENTS = (
    Replacement(f"{VLLM}.layernorm", "RMSNorm", RMSNormLayer),
    Replacement(f"{VLLM}.layernorm", "GemmaRMSNorm", GemmaRMSNormLayer),
    Replacement(f"{VLLM}.layernorm", "LayerNorm", LayerNormLayer, since="until 0.32 models use torch.nn.LayerNorm"),
    Replacement(f"{VLLM}.rotary_embedding", "MRotaryEmbedding", MRotaryEmbeddingLayer),
    Replacement(f"{VLLM}.activation", "SiluAndMul", activation(ops.silu_and_mul)),
    Replacement(f"{VLLM}.activation", "MulAndSilu", activation(ops.mul_and_silu)),
    Replacement(f"{VLLM}.activation", "GeluAndMul", activation(ops.gelu_and_mul, approximate="approximate")),
    Replacement(
        f"{VLLM}.activation", "SwigluOAIAndMul", activation(ops.swigluoai_and_mul, alpha="alpha", limit="limit")
    ),
    Replacement(
        f"{VLLM}.activation",
        "SiluAndMulWithClamp",
        activation(ops.silu_and_mul_with_clamp, limit="swiglu_limit", alpha="alpha", beta="beta"),
    ),
    Replacement(f"{VLLM}.activation", "NewGELU", activation(ops.gelu_new)),
    Replacement(f"{VLLM}.activation", "FastGELU", activation(ops.gelu_fast)),
    Replacement(f"{VLLM}.activation", "QuickGELU", activation(ops.quick_gelu)),
    Replacement(f"{VLLM}.activation", "ReLUSquaredActivation", activation(ops.relu2)),
    Replacement(f"{HW_AGNOSTIC}.layernorm", "RMSNorm", RMSNormLayer, since="0.30 brought the second registry"),
    Replacement(f"{HW_AGNOSTIC}.activation", "SiluAndMul", activation(ops.silu_and_mul), since="as above"),
)


def register() -> None:
    """Registers every replacement with vLLM, once in a process. Raises LookupError for one that names nothing."""
    for replacement in (*REPLACEMENTS, *_rotary_embeddings()):
        original = _find(replacement)
        if original is not None:
            layer = type(f"Opset{original.__name__}", (replacement.layer, original), {"__module__": __name__})
            original.register_oot(layer)
            # vLLM has renamed it after its class. The name that users switch the op by stays.
            layer.name = original.name


def unregister() -> None:
    """Takes the replacements back: models that are built from now on have vLLM's layers."""
    for module in (REGISTRY, HW_AGNOSTIC_REGISTRY):
        registry = getattr(sys.modules.get(module), "op_registry_oot", {})
        for name in [name for name, layer in registry.items() if issubclass(layer, OpsetLayer)]:
            del registry[name]


def bind(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """For a model that was just loaded, within vLLM's configuration: its layers may be older than this engine."""
    for module in model.modules():
        if isinstance(module, OpsetLayer):
            module.bind(dtype)


def _find(replacement: Replacement) -> type | None:
    """The class to replace, or None where this release does not have it and need not."""
    try:
        found = getattr(importlib.import_module(replacement.module), replacement.cls, None)
    except ModuleNotFoundError:
        found = None
    if hasattr(found, "register_oot"):
        return found
    if replacement.since is None:
        raise LookupError(f"{replacement.module}.{replacement.cls} is no layer of this vLLM that could be replaced")
    return None


def _rotary_embeddings() -> Iterator[Replacement]:
    """vLLM's rotary embeddings that share one forward; found by that, since releases add some and drop some."""
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    def family(cls: type) -> Iterator[type]:
        yield cls
        for child in cls.__subclasses__():
            yield from family(child)

    for cls in family(RotaryEmbedding):
        if cls.forward_native is RotaryEmbedding.forward_native and not issubclass(cls, OpsetLayer):
            yield Replacement(cls.__module__, cls.__name__, RotaryEmbeddingLayer)


def _run(op: Op, dtype: torch.dtype, **known) -> Callable:
    """The kernel for an op and what its layer knows of the problem."""
    from vllm.platforms import current_platform

    return selection.select(op, op.problem(device=current_platform.device_type, dtype=dtype, **known)).run


def _dtype(tensor: torch.Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype
