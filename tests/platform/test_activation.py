"""When the plugin is used, and that it never fails silently."""

import logging
import subprocess
import sys
from collections.abc import Collection

import pytest
import torch

from vllm_opset import platform
from vllm_opset.kernels import ascend
from vllm_opset.platform import stock

PLATFORM = "vllm_opset.platform.OpsetCpuPlatform"


@pytest.mark.parametrize(
    ("choice", "answer"), [("off", None), ("cpu", PLATFORM), ("auto", PLATFORM), ("", PLATFORM), (None, PLATFORM)]
)
def test_choice(choice, answer, monkeypatch):
    monkeypatch.delenv("OPSET_PLATFORM", raising=False)
    if choice is not None:
        monkeypatch.setenv("OPSET_PLATFORM", choice)
    # vLLM asks twice.
    assert [platform.activate(), platform.activate()] == [answer, answer]


@pytest.fixture
def machine(monkeypatch):
    """`machine("cuda", found=False, modules=["_C"])`: PyTorch's accelerator, and vLLM's extension modules."""

    def machine(accelerator: str | None, found: bool = True, modules: Collection[str] = ()) -> None:
        monkeypatch.setattr(platform, "_accelerator", lambda: accelerator)
        monkeypatch.setattr(platform, "_is_found", lambda accelerator: found)
        monkeypatch.setattr(stock, "_has", lambda module: module in modules)
        monkeypatch.setenv("OPSET_PLATFORM", "auto")
        if found:
            monkeypatch.setattr(platform, "_why_no_gpu", lambda choice: None)
            monkeypatch.setattr(platform, "_why_no_npu", lambda: None)

    return machine


@pytest.fixture
def said(monkeypatch) -> list[tuple[int, str]]:
    """The logged messages, with their levels."""
    said = []
    monkeypatch.setattr(platform, "_log_once", lambda *words: said.append(words))
    return said


@pytest.fixture
def nvml_of_one_gpu(monkeypatch) -> None:
    """NVML counts the GPUs of the machine, whatever variables hide."""
    from vllm.utils.import_utils import import_pynvml

    nvml = import_pynvml()
    for name, answer in {"nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetCount": 1}.items():
        monkeypatch.setattr(nvml, name, lambda answer=answer: answer)


FOR_CUDA, FOR_ROCM, FOR_CPUS = {"_C", "_C_stable_libtorch"}, {"_C", "_C_stable_libtorch", "_rocm_C"}, {"_C", "_C_AVX2"}


@pytest.mark.parametrize(
    ("accelerator", "modules", "answer"),
    [
        ("cuda", (), "vllm_opset.platform.OpsetCudaPlatform"),
        ("cuda", FOR_CUDA, "vllm_opset.platform.OpsetNativePlatform"),
        ("cuda", FOR_CPUS, None),
        ("npu", (), "vllm_opset.platform.OpsetNpuPlatform"),
        ("xpu", (), None),
        ("rocm", FOR_ROCM, None),
        (None, (), PLATFORM),
        (None, FOR_CUDA, PLATFORM),
        (None, FOR_CPUS, None),
    ],
)
def test_the_machine_decides_unless_forced(accelerator, modules, answer, machine, monkeypatch):
    machine(accelerator, modules=modules)
    assert platform.activate() == answer
    monkeypatch.setenv("OPSET_PLATFORM", "cpu")
    assert platform.activate() == PLATFORM


def test_beside_a_build_for_cpus_it_steps_aside_in_one_line(machine, said):
    machine(None, modules=FOR_CPUS)
    assert platform.activate() is None
    ((level, line),) = said
    assert level == logging.INFO and "built for CPUs" in line and "OPSET_PLATFORM=cpu" in line


@pytest.mark.parametrize("modules", [(), FOR_CUDA, FOR_CPUS], ids=["no kernels", "for CUDA", "for CPUs"])
def test_stock_vllm_that_cannot_run_is_warned_of(modules, machine, said, monkeypatch):
    machine("cuda", modules=modules)
    monkeypatch.setenv("OPSET_PLATFORM", "off")
    assert platform.activate() is None
    if modules:
        assert not said
    else:
        ((level, line),) = said
        assert level == logging.WARNING and "built without compiled kernels" in line and "Unset OPSET_PLATFORM" in line


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


def test_an_npu_that_is_asked_for_and_not_there_is_an_error(machine, monkeypatch):
    machine("npu", found=False)
    monkeypatch.setattr(ascend, "unavailable", lambda: None)
    monkeypatch.setenv("OPSET_PLATFORM", "npu")
    with pytest.raises(platform.PluginError, match="OPSET_PLATFORM=npu: PyTorch finds no npu device"):
        getattr(platform, platform.activate().rpartition(".")[2])


@pytest.mark.parametrize("choice", ["cuda", "native"])
def test_a_gpu_that_cannot_be_used_is_an_error_with_the_cure(choice, machine, monkeypatch):
    machine("cuda", found=False, modules=FOR_CUDA)
    monkeypatch.setenv("OPSET_PLATFORM", choice)
    activated = platform.activate().rpartition(".")[2]
    with pytest.raises(
        platform.PluginError, match="no NVIDIA GPU can be used: this PyTorch was built without CUDA: pip"
    ):
        getattr(platform, activated)


@pytest.mark.parametrize("modules", [(), FOR_CUDA], ids=["no kernels", "for CUDA"])
@pytest.mark.parametrize(
    ("accelerator", "visible", "reason"),
    [
        (
            "cuda",
            None,
            r"finds no NVIDIA GPU \(the driver is too old\): see that nvidia-smi .* new enough for CUDA 13\.0",
        ),
        ("cuda", "7", r"the driver is too old; CUDA_VISIBLE_DEVICES='7'"),
        ("cuda", "", r"CUDA_VISIBLE_DEVICES='' hides every NVIDIA GPU, as Ray does .*: unset it"),
        ("cuda", "-1", r"CUDA_VISIBLE_DEVICES='-1' hides every NVIDIA GPU"),
        ("npu", None, "PyTorch finds no npu device"),
        ("rocm", None, "PyTorch finds no rocm device"),
    ],
)
def test_the_cpu_does_not_serve_for_an_accelerator_unasked(
    accelerator, visible, reason, modules, machine, said, monkeypatch
):
    machine(accelerator, found=False, modules=modules)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: torch._assert(False, "the driver is too old. Update it."))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(platform.PluginError, match=f"{reason}.* set OPSET_PLATFORM=cpu"):
        getattr(platform, platform.activate().rpartition(".")[2])
    monkeypatch.setenv("OPSET_PLATFORM", "cpu")
    assert platform.activate() == PLATFORM and not said


@pytest.mark.window
@pytest.mark.parametrize("choice", ["auto", "native"])
def test_vllms_own_wheel_serves_in_a_process_without_gpus_of_ray(choice, machine, nvml_of_one_gpu, monkeypatch):
    """Ray gives a driver that asked for no GPU an empty variable, and its workers GPUs of their own."""
    machine("cuda", found=False, modules=FOR_CUDA)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("OPSET_PLATFORM", choice)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert platform.activate() == "vllm_opset.platform.OpsetNativePlatform"
    for other, visible in ((choice, "-1"), ("cuda", "")):
        monkeypatch.setenv("OPSET_PLATFORM", other)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(platform.PluginError, match="hides every NVIDIA GPU"):
            getattr(platform, platform.activate().rpartition(".")[2])


def run(script: str, **environment) -> subprocess.CompletedProcess:
    """Runs the script in a process of its own that has not imported vLLM yet."""
    import os

    return subprocess.run(
        [sys.executable, "-c", script], env=os.environ | environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    "module",
    [
        pytest.param("vllm_opset.platform.cpu.platform", marks=pytest.mark.window),
        "vllm_opset.selection",
        "vllm_opset.model.layers",
    ],
)
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
    assert "this vLLM was built without compiled kernels" in process.stdout + process.stderr


@pytest.mark.window
def test_another_platform_in_its_place_is_an_error():
    script = "from vllm.platforms import current_platform; import vllm_opset.platform as p; p.register()"
    process = run(script, VLLM_PLUGINS="none")
    assert process.returncode != 0
    last = process.stderr.strip().splitlines()[-1]
    assert "vLLM chose UnspecifiedPlatform" in last and "OPSET_PLATFORM=off" in last
