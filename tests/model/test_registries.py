"""vLLM's second family of layers may come to share the first one's registry, or to lend its names to it.

https://github.com/vllm-project/vllm/pull/53153 and https://github.com/vllm-project/vllm/pull/57715 propose these.
"""

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import custom_op
from vllm.model_executor.layers import activation, layernorm

from vllm_opset.model import layers, registration

pytestmark = pytest.mark.window
hw_agnostic = pytest.importorskip(
    "vllm.model_executor.hw_agnostic.custom_op", reason="came with 0.28: ends with it as the oldest"
)

from vllm.model_executor.hw_agnostic.layers import activation as hw_activation  # noqa: E402
from vllm.model_executor.hw_agnostic.layers import layernorm as hw_layernorm  # noqa: E402

# Layers of both families, with arguments and a width of their inputs.
FAMILIES = [
    (layernorm.RMSNorm, hw_layernorm.RMSNorm, (48,)),
    (activation.SiluAndMul, hw_activation.SiluAndMul, ()),
]


@pytest.fixture(autouse=True)
def empty_registries(monkeypatch):
    for module in (custom_op, hw_agnostic):
        monkeypatch.setattr(module, "op_registry_oot", {})
    with set_current_vllm_config(VllmConfig()):
        yield


def check(cls: type, arguments: tuple) -> None:
    """An object of vLLM's class is opset's layer and computes the same."""
    layer = cls(*arguments)
    assert isinstance(layer, layers.OpsetLayer) and isinstance(layer, cls) and layer.name == cls.name
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(5, 48)
    torch.testing.assert_close(layer(x), layer.forward_native(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("cls", "hw_cls", "arguments"), FAMILIES)
def test_families_with_a_registry_each(cls, hw_cls, arguments):
    registration.register()
    assert custom_op.op_registry_oot[cls.__name__] is not hw_agnostic.op_registry_oot[cls.__name__]
    check(cls, arguments)
    check(hw_cls, arguments)


@pytest.mark.parametrize(("cls", "hw_cls", "arguments"), FAMILIES)
def test_families_that_share_a_registry(cls, hw_cls, arguments, monkeypatch):
    monkeypatch.setattr(hw_agnostic, "op_registry_oot", custom_op.op_registry_oot)
    registration.register()
    check(cls, arguments)
    check(hw_cls, arguments)
    registration.unregister()
    assert not custom_op.op_registry_oot


@pytest.mark.parametrize(("cls", "hw_cls", "arguments"), FAMILIES)
def test_a_name_that_is_lent_while_plugins_are_loaded(cls, hw_cls, arguments, monkeypatch):
    with monkeypatch.context() as while_plugins_load:
        while_plugins_load.setattr(layernorm, "RMSNorm", hw_layernorm.RMSNorm)
        while_plugins_load.setattr(activation, "SiluAndMul", hw_activation.SiluAndMul)
        registration.register()
    check(cls, arguments)
    check(hw_cls, arguments)
