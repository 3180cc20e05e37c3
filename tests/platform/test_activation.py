"""When the plugin is used, and that it never fails to be used in silence."""

import subprocess
import sys

import pytest

from vllm_opset import platform

PLATFORM = "vllm_opset.platform.OpsetCpuPlatform"


@pytest.mark.parametrize(("choice", "answer"), [("off", None), ("cpu", PLATFORM), ("auto", PLATFORM), (None, PLATFORM)])
def test_choice(choice, answer, monkeypatch):
    monkeypatch.delenv("OPSET_PLATFORM", raising=False)
    if choice is not None:
        monkeypatch.setenv("OPSET_PLATFORM", choice)
    # vLLM asks twice.
    assert [platform.activate(), platform.activate()] == [answer, answer]


@pytest.mark.parametrize(
    ("accelerator", "compiled_kernels", "answer"),
    [
        ("cuda", False, "vllm_opset.platform.OpsetCudaPlatform"),
        ("cuda", True, "vllm_opset.platform.OpsetNativePlatform"),
        ("npu", False, "vllm_opset.platform.OpsetNpuPlatform"),
        ("xpu", False, None),
        (None, True, PLATFORM),
    ],
)
def test_the_machine_decides_unless_forced(accelerator, compiled_kernels, answer, monkeypatch):
    monkeypatch.setattr(platform, "_accelerator", lambda: accelerator)
    monkeypatch.setattr(platform, "_has_compiled_kernels", lambda: compiled_kernels)
    monkeypatch.setattr(platform, "_why_no_gpu", lambda: None)
    monkeypatch.setattr(platform, "_why_no_npu", lambda: None)
    monkeypatch.setenv("OPSET_PLATFORM", "auto")
    assert platform.activate() == answer
    monkeypatch.setenv("OPSET_PLATFORM", "cpu")
    assert platform.activate() == PLATFORM


def test_unknown_choice_is_raised_where_vllm_cannot_swallow_it(monkeypatch):
    from vllm.utils.import_utils import resolve_obj_by_qualname

    monkeypatch.setenv("OPSET_PLATFORM", "gpu")
    with pytest.raises(platform.PluginError, match="OPSET_PLATFORM='gpu' is not a choice; known: auto, cpu,"):
        resolve_obj_by_qualname(platform.activate())


def test_an_npu_that_cannot_be_used_is_an_error_with_its_cure(monkeypatch):
    from vllm.utils.import_utils import resolve_obj_by_qualname

    monkeypatch.setenv("OPSET_PLATFORM", "npu")
    with pytest.raises(platform.PluginError, match=r"OPSET_PLATFORM=npu: torch_npu is not installed; .* pip install"):
        resolve_obj_by_qualname(platform.activate())


@pytest.mark.parametrize("choice", ["cuda", "native"])
def test_a_gpu_that_cannot_be_used_is_an_error_with_the_cure(choice, monkeypatch):
    monkeypatch.setattr(platform, "_has_compiled_kernels", lambda: True)
    monkeypatch.setenv("OPSET_PLATFORM", choice)
    activated = platform.activate().rpartition(".")[2]
    with pytest.raises(
        platform.PluginError, match="no NVIDIA GPU can be used: this PyTorch was built without CUDA: pip"
    ):
        getattr(platform, activated)


def test_without_a_gpu_that_pytorch_wants_the_log_says_why_it_is_the_cpu(monkeypatch):
    monkeypatch.setattr(platform, "_wants_gpu", lambda: True)
    monkeypatch.setattr(platform, "_why_no_gpu", lambda: "the driver is too old: update it")
    monkeypatch.setenv("OPSET_PLATFORM", "auto")
    said = []
    monkeypatch.setattr(platform, "_log_once", said.append)
    assert platform.activate() == PLATFORM
    assert said == ["vllm-opset takes the CPU: the driver is too old: update it"]


def run(script: str, **environment) -> subprocess.CompletedProcess:
    """The script in a process of its own, in which vLLM was not imported yet."""
    import os

    return subprocess.run(
        [sys.executable, "-c", script], env=os.environ | environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    "module", ["vllm_opset.platform.cpu.platform", "vllm_opset.selection", "vllm_opset.platform.layers"]
)
@pytest.mark.window
def test_module_that_cannot_be_imported_is_named_with_the_cure(module):
    """None in sys.modules makes Python refuse to import the module."""
    process = run(f"import sys; sys.modules[{module!r}] = None; from vllm import EngineArgs; EngineArgs('model')")
    assert process.returncode != 0
    last = process.stderr.strip().splitlines()[-1]
    assert "PluginError" in last and module in last and "OPSET_PLATFORM=off" in last


@pytest.mark.window
def test_off_leaves_stock_vllm():
    process = run(
        "from vllm.platforms import current_platform; from vllm.plugins import load_general_plugins\n"
        "load_general_plugins(); import sys\n"
        "from vllm.model_executor.custom_op import op_registry_oot\n"
        "print(type(current_platform).__name__, len(op_registry_oot), 'vllm_opset.selection' in sys.modules)",
        OPSET_PLATFORM="off",
    )
    assert process.stdout.splitlines()[-1] == "UnspecifiedPlatform 0 False", process.stderr


@pytest.mark.window
def test_another_platform_in_its_place_is_an_error():
    script = "from vllm.platforms import current_platform; import vllm_opset.platform as p; p.register()"
    process = run(script, VLLM_PLUGINS="none")
    assert process.returncode != 0
    last = process.stderr.strip().splitlines()[-1]
    assert "vLLM chose UnspecifiedPlatform" in last and "OPSET_PLATFORM=off" in last
