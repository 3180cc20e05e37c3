"""On a CPU, layers of experts run without vLLM's operator for compilers."""

import models
import pytest
import torch
from engines import generate
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = [
    pytest.mark.engine,
    pytest.mark.window,
    pytest.mark.skipif(torch.cuda.is_available(), reason="of CPUs: runs on a machine without a GPU"),
]


class Operators(TorchDispatchMode):
    """Collects the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe"], ids=["no shared expert", "a shared expert"])
def test_no_operator_is_called_for_experts(name, engine, tmp_path):
    models.build(name, tmp_path)
    with engine(tmp_path) as llm, Operators() as called:
        generate(llm, models.prompts()[:1], max_tokens=2)
    assert "aten.embedding.default" in called.names
    assert not any("moe_forward" in name for name in called.names)
