"""What `make next-release` lists: a vLLM that is changed here, compared with itself before the change."""

import runpy
from pathlib import Path

import pytest
import surface

from vllm_opset.model import registration

next_release = runpy.run_path(str(Path(__file__).parents[2] / "tools/next_release.py"))
MODULES = ("vllm_opset.platform.base", "vllm_opset.platform.cpu.worker")


@pytest.fixture(scope="module", autouse=True)
def few_modules():
    """This file looks at two of the package's modules, which say enough and take a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surface, "module_names", lambda: list(MODULES))
        yield


@pytest.fixture
def drift():
    """`drift()`: what changed since this fixture was made, as (kind, name) and the change."""
    before = surface.surface()
    return lambda: {(kind, name): change for kind, name, change in next_release["drifted"](before, surface.surface())}


def test_nothing_drifts_by_itself(drift):
    assert drift() == {}


def test_every_kind_of_drift_is_listed(drift, monkeypatch):
    from vllm import envs
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor import custom_op
    from vllm.platforms.interface import Platform

    monkeypatch.setattr(Platform, "get_attention_backend_class", Platform.__dict__["get_attn_backend_cls"], False)
    monkeypatch.delattr(Platform, "get_attn_backend_cls")
    monkeypatch.setattr(Platform, "opaque_attention_op", classmethod(lambda cls, layer: False))
    monkeypatch.setitem(envs.environment_variables, "VLLM_BRAND_NEW", lambda: None)
    monkeypatch.delitem(custom_op.op_registry_oot, "RMSNorm")
    monkeypatch.delattr("vllm.v1.attention.backends.registry.register_backend")
    monkeypatch.delattr("vllm.model_executor.models.registry._MULTIMODAL_MODELS")
    monkeypatch.delitem(AsyncEngineArgs.__dataclass_fields__, "seed")
    platform = "vllm.platforms.interface.Platform"
    found = drift()
    assert found["overridden method", f"{platform}.get_attn_backend_cls"] == "gone"
    assert found["overridden method", f"{platform}.opaque_attention_op"] == "() -> (layer)"
    assert found["refused call", "vllm_opset.platform.base.OpsetPlatform.opaque_attention_op"].startswith("new refuses")
    assert found["hook", "Platform.get_attention_backend_class"].startswith("new (selected_backend")
    assert found["import", f"{MODULES[0]}: vllm.model_executor.models.registry._MULTIMODAL_MODELS"] == "new missing"
    assert found["setting", "AsyncEngineArgs.seed"] == "gone"
    assert found["variable", "VLLM_BRAND_NEW"] == "new"
    assert found["registration", f"{registration.REGISTRY}: RMSNorm"] == "gone"
    assert found["bridge", "attention backend"] == "needed -> not needed"
