"""vLLM with the plugin, in this process."""

import types
from collections.abc import Callable, Iterator

import pytest
from plugin import registered  # noqa: F401

from vllm_opset import selection


@pytest.fixture(autouse=True)
def forgetting() -> Iterator[None]:
    """Leaves no override to the tests of other folders in this process."""
    yield
    selection.configure()
    selection.forget()


@pytest.fixture
def alone() -> Iterator[None]:
    """A tensor-parallel group of a single process, under a configuration without a model."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    selection.configure()
    selection.forget()
    with set_current_vllm_config(VllmConfig()):
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
            parallel_state.initialize_model_parallel()
        yield


@pytest.fixture
def layer(monkeypatch) -> Callable:
    """`layer(**arguments)`: a layer of experts with vLLM's method, as on a GPU where Triton kernels compute it."""
    import torch
    from expert_layers import HIDDEN_SIZE, NUM_EXPERTS, TOP_K, WIDTH, FusedMoE
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    monkeypatch.delitem(op_registry_oot, UnquantizedFusedMoEMethod.__name__, raising=False)
    numbers = iter(range(100))

    def layer(**arguments) -> torch.nn.Module:
        sizes = {"num_experts": NUM_EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN_SIZE, "intermediate_size": WIDTH}
        how = {"prefix": f"layers.{next(numbers)}", "params_dtype": torch.float32}
        made = FusedMoE(**sizes | how | arguments)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        method = made.routed_experts.quant_method
        method.unquantized_backend = UnquantizedMoeBackend.TRITON
        experts_of_vllm = types.SimpleNamespace(consumes_expert_mask=False)
        method.moe_kernel = types.SimpleNamespace(output_is_reduced=lambda: False, fused_experts=experts_of_vllm)
        return made

    return layer
