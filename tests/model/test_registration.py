"""The replacements of vLLM's layers are registered, are taken back, and name classes that exist."""

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm

from vllm_opset.model import layers, registration

pytestmark = pytest.mark.window


@pytest.fixture(autouse=True)
def configured():
    """vLLM's configuration while layers are built, without a model."""
    with set_current_vllm_config(VllmConfig()):
        yield


def test_every_replacement_is_registered():
    """Covers the names that this vLLM has; `_find` raises for a name that it should have but lacks."""
    for replacement in (*registration.REPLACEMENTS, *registration._rotary_embeddings()):
        original = registration._find(replacement)
        if original is not None:
            # vLLM has two registries; each class knows its own.
            registry = original.register_oot.__func__.__globals__["op_registry_oot"]
            registered = registry[replacement.cls]
            assert issubclass(registered, replacement.layer) and issubclass(registered, original)


@pytest.fixture
def registries():
    """vLLM's registries, one or two; after the test their former contents are restored."""
    originals = filter(None, map(registration._find, registration.REPLACEMENTS))
    found = [original.register_oot.__func__.__globals__["op_registry_oot"] for original in originals]
    both = list({id(registry): registry for registry in found}.values())
    before = [dict(registry) for registry in both]
    yield both
    for registry, known in zip(both, before, strict=True):
        registry.clear()
        registry.update(known)


def test_replacements_can_be_taken_back(registries):
    def ours() -> list[set[str]]:
        return [{name for name, cls in known.items() if issubclass(cls, layers.OpsetLayer)} for known in registries]

    registered = ours()
    assert all(registered)
    for registry in registries:
        registry["SomebodyElses"] = torch.nn.Identity
    registration.unregister()
    assert not any(ours()) and all("SomebodyElses" in registry for registry in registries)
    assert not isinstance(RMSNorm(48), layers.OpsetLayer)
    registration.register()
    assert ours() == registered and isinstance(RMSNorm(48), layers.OpsetLayer)


def test_a_replacement_that_names_nothing_is_an_error():
    wrong = registration.Replacement(f"{registration.VLLM}.layernorm", "RMSNormal", layers.RMSNormLayer)
    with pytest.raises(LookupError, match="RMSNormal"):
        registration._find(wrong)
    # This class exists, but vLLM would never replace it.
    wrong = registration.Replacement("torch.nn", "LayerNorm", layers.LayerNormLayer)
    with pytest.raises(LookupError, match="LayerNorm"):
        registration._find(wrong)


def test_every_rotary_embedding_that_shares_a_forward_is_found():
    found = {replacement.cls for replacement in registration._rotary_embeddings()}
    assert found >= {
        "RotaryEmbedding",
        "Llama3RotaryEmbedding",
        "YaRNScalingRotaryEmbedding",
        "LinearScalingRotaryEmbedding",
        "DynamicNTKScalingRotaryEmbedding",
    }
    assert "FourierRotaryEmbedding" not in found
