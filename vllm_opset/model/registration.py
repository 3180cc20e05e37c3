"""The registration of opset's layers as vLLM's out-of-tree replacements, and the list of what they replace.

Each registered class is a subclass of the layer that it replaces. It keeps that layer's weights and its name in
`custom_ops` flags.
"""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_opset import ops
from vllm_opset.model.layers import (
    ApplyRotaryEmbLayer,
    GeluAndMulSparseLayer,
    GemmaRMSNormLayer,
    LayerNormLayer,
    MRotaryEmbeddingLayer,
    OpsetLayer,
    RMSNormGatedLayer,
    RMSNormLayer,
    RotaryEmbeddingLayer,
    activation,
)

VLLM = "vllm.model_executor.layers"
HW_AGNOSTIC = "vllm.model_executor.hw_agnostic.layers"
REGISTRY = "vllm.model_executor.custom_op"
HW_AGNOSTIC_REGISTRY = "vllm.model_executor.hw_agnostic.custom_op"


@dataclass(frozen=True)
class Replacement:
    """A class derived from `layer` and `cls` replaces `cls` of `module`.

    since: the reason why a release may lack `cls`; None if all releases have it.
    """

    module: str
    cls: str
    layer: type[OpsetLayer]
    since: str | None = None


REPLACEMENTS = (
    Replacement(f"{VLLM}.layernorm", "RMSNorm", RMSNormLayer),
    Replacement(f"{VLLM}.layernorm", "GemmaRMSNorm", GemmaRMSNormLayer),
    Replacement(f"{VLLM}.layernorm", "LayerNorm", LayerNormLayer, since="until 0.31 models use torch.nn.LayerNorm"),
    Replacement(f"{VLLM}.layernorm", "RMSNormGated", RMSNormGatedLayer),
    Replacement(f"{VLLM}.rotary_embedding", "MRotaryEmbedding", MRotaryEmbeddingLayer),
    Replacement(f"{VLLM}.rotary_embedding.common", "ApplyRotaryEmb", ApplyRotaryEmbLayer),
    Replacement(f"{VLLM}.activation", "GeluAndMulSparse", GeluAndMulSparseLayer),
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
    Replacement(f"{VLLM}.activation", "FatreluAndMul", activation(ops.fatrelu_and_mul, threshold="threshold")),
    Replacement(f"{VLLM}.activation", "SwigluStepAndMul", activation(ops.swiglustep_and_mul, limit="limit")),
    Replacement(
        f"{VLLM}.activation",
        "SituAndMul",
        activation(ops.situ_and_mul, beta="beta", linear_beta="linear_beta"),
        since="0.27 brought it",
    ),
    Replacement(f"{VLLM}.activation", "GELU", activation(ops.gelu)),
    Replacement(f"{VLLM}.activation", "GELUTanh", activation(ops.gelu_tanh)),
    Replacement(f"{VLLM}.activation", "NewGELU", activation(ops.gelu_new)),
    Replacement(f"{VLLM}.activation", "FastGELU", activation(ops.gelu_fast)),
    Replacement(f"{VLLM}.activation", "QuickGELU", activation(ops.quick_gelu)),
    Replacement(f"{VLLM}.activation", "ReLUSquaredActivation", activation(ops.relu2)),
    Replacement(f"{HW_AGNOSTIC}.layernorm", "RMSNorm", RMSNormLayer, since="0.28 brought the second registry"),
    Replacement(f"{HW_AGNOSTIC}.activation", "SiluAndMul", activation(ops.silu_and_mul), since="as above"),
)


def register() -> None:
    """Register every replacement with vLLM, once in a process. Raises LookupError if a required class is missing."""
    for layer, originals in _by_place():
        layer = type(f"Opset{originals[0].__name__}", (layer, *_bases(originals)), {"__module__": __name__})
        originals[0].register_oot(layer)
        # register_oot has set the name to that of our class. Users switch the op on and off by the original name.
        layer.name = originals[0].name


def _by_place() -> Iterator[tuple[type[OpsetLayer], list[type]]]:
    """The classes to replace, grouped by their place: a registry has one place for all classes of a name.

    Up to vLLM 0.33 each place has one class. The two families of layers may come to share a registry.
    """
    places: dict[tuple[int, str], tuple[type[OpsetLayer], list[type]]] = {}
    for replacement in (*REPLACEMENTS, *_rotary_embeddings()):
        original = _find(replacement)
        if original is not None:
            registry = original.register_oot.__globals__["op_registry_oot"]
            _, originals = places.setdefault((id(registry), original.__name__), (replacement.layer, []))
            if original not in originals:
                originals.append(original)
    yield from places.values()


def _bases(originals: list[type]) -> Iterator[type]:
    """Bases that make objects of all these classes. The first one's constructor makes them."""
    first, *others = originals
    yield first
    for other in others:
        yield from (_without_constructor(other), other)


def _without_constructor(cls: type) -> type:
    """A base that skips the constructor of the base after it."""

    def __init__(self, *args, **kwargs) -> None:
        super(cls, self).__init__(*args, **kwargs)

    return type(f"Without{cls.__name__}", (), {"__init__": __init__})


def unregister() -> None:
    """Remove the replacements: models that are built from now on have vLLM's layers."""
    for module in (REGISTRY, HW_AGNOSTIC_REGISTRY):
        registry = getattr(sys.modules.get(module), "op_registry_oot", {})
        for name in [name for name, layer in registry.items() if issubclass(layer, OpsetLayer)]:
            del registry[name]


def _find(replacement: Replacement) -> type | None:
    """The class to replace, or None if this release lacks it and is allowed to lack it."""
    try:
        found = getattr(importlib.import_module(replacement.module), replacement.cls, None)
    except ModuleNotFoundError:
        found = None
    if _is_of_the_other_family(found, replacement):
        found = _registered(replacement)
    if hasattr(found, "register_oot"):
        return found
    if replacement.since is None:
        raise LookupError(f"{replacement.module}.{replacement.cls} is no layer of this vLLM that could be replaced")
    return None


def _is_of_the_other_family(found: type | None, replacement: Replacement) -> bool:
    """Whether vLLM has bound the layer's name to the class in HW_AGNOSTIC, which it may do while plugins are loaded."""
    return getattr(found, "__module__", "").startswith(HW_AGNOSTIC) and not replacement.module.startswith(HW_AGNOSTIC)


def _registered(replacement: Replacement) -> type | None:
    """The class as vLLM registered it, when its module was imported."""
    registered = importlib.import_module(REGISTRY).op_registry.values()
    found = (cls for cls in registered if cls.__module__.startswith(replacement.module))
    return next((cls for cls in found if cls.__name__ == replacement.cls), None)


def _rotary_embeddings() -> Iterator[Replacement]:
    """vLLM's rotary embeddings that share one forward method. Releases add and drop classes, so there is no list."""
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    def family(cls: type) -> Iterator[type]:
        yield cls
        for child in cls.__subclasses__():
            yield from family(child)

    for cls in family(RotaryEmbedding):
        if cls.forward_native is RotaryEmbedding.forward_native and not issubclass(cls, OpsetLayer):
            yield Replacement(cls.__module__, cls.__name__, RotaryEmbeddingLayer)
