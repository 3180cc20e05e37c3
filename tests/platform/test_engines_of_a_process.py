"""Engines of one process with different kernels: each keeps its own, even in objects that vLLM shares among models."""

from collections.abc import Callable

import pytest
import torch

from vllm_opset import selection
from vllm_opset.model import layers
from vllm_opset.platform.compat import forget_shared_layers

pytestmark = pytest.mark.window


def rotary_embedding() -> torch.nn.Module:
    from vllm.model_executor.layers.rotary_embedding import get_rope

    return get_rope(32, 64, dtype=torch.float32)


def gelu() -> torch.nn.Module:
    from vllm.model_executor.layers.activation import get_act_fn

    return get_act_fn("gelu")


def silu_and_mul() -> torch.nn.Module:
    from vllm.model_executor.layers.activation import get_act_and_mul_fn

    return get_act_and_mul_fn("silu")


def load(make: Callable[[], torch.nn.Module], kernel: str) -> torch.nn.ModuleList:
    """Loads a model of two such layers as a worker does, with an override for this engine."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig(additional_config={"opset": {"kernels": {make.__name__: kernel}}})
    selection.configure(config.additional_config)
    selection.forget()
    with set_current_vllm_config(config):
        forget_shared_layers()
        model = torch.nn.ModuleList(make() for _ in range(2))
        layers.bind(model, torch.float32)
    return model


@pytest.fixture(autouse=True)
def without_overrides_afterwards():
    yield
    selection.configure()
    selection.forget()
    forget_shared_layers()


def kernels(model: torch.nn.ModuleList) -> set[str]:
    return {of_op[torch.float32].__module__ for layer in model for of_op in layer.opset_kernels}


@pytest.mark.parametrize("make", [rotary_embedding, gelu, silu_and_mul])
def test_each_engine_keeps_the_kernels_of_layers_that_vllm_shares(make):
    first = load(make, "cpu")
    before = kernels(first)
    second = load(make, "reference")
    assert kernels(second) != before == kernels(first)
    assert first[0] is first[1], "layers of one model still share"
