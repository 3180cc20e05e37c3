"""vLLM inspects the class of a model without a separate process."""

import subprocess

import pytest
from vllm.model_executor.models.registry import _LazyRegisteredModel
from vllm.platforms import current_platform


@pytest.mark.window
def test_a_models_class_is_looked_at_in_this_process(monkeypatch, tmp_path):
    def another_process(*_, **__):
        raise AssertionError("another process was started")

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))  # vLLM caches its knowledge of classes there
    monkeypatch.setattr(subprocess, "run", another_process)
    current_platform.pre_register_and_update()
    found = _LazyRegisteredModel("vllm.model_executor.models.opt", "OPTForCausalLM").inspect_model_cls()
    assert found.architecture == "OPTForCausalLM" and found.is_text_generation_model
