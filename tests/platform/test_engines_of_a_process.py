"""Engines of one process with different kernels: each keeps its own, even in objects that vLLM shares among models."""

import pytest
import torch

from vllm_opset import selection
from vllm_opset.model import layers
from vllm_opset.platform.compat import forget_shared_layers

pytestmark = pytest.mark.window


class Model(torch.nn.Module):
    """Two layers with a rotary embedding each, as in vLLM's models."""

    def __init__(self) -> None:
        from vllm.model_executor.layers.rotary_embedding import get_rope

        super().__init__()
        self.layers = torch.nn.ModuleList(get_rope(32, 64, dtype=torch.float32) for _ in range(2))


def load(kernel: str) -> Model:
    """Loads the model as a worker does, with an override for this engine."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig(additional_config={"opset": {"kernels": {"rotary_embedding": kernel}}})
    selection.configure(config.additional_config)
    selection.forget()
    with set_current_vllm_config(config):
        forget_shared_layers()
        model = Model()
        layers.bind(model, torch.float32)
    return model


@pytest.fixture(autouse=True)
def without_overrides_afterwards():
    yield
    selection.configure()
    selection.forget()
    forget_shared_layers()


def kernels(model: Model) -> set[str]:
    return {layer._rotate[torch.float32].__module__ for layer in model.layers}


def test_each_engine_keeps_the_kernels_of_its_rotary_embeddings():
    first = load("cpu")
    before = kernels(first)
    second = load("reference")
    assert kernels(second) != before == kernels(first)
    assert first.layers[0] is first.layers[1], "layers of one model still share"
