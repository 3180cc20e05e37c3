"""`vllm-opset doctor`, as a user runs it."""

import json
import tomllib
from dataclasses import asdict

import pytest
import torch
from commands import command
from processes import run
from readme import ROOT

from vllm_opset import kernel, ops, selection
from vllm_opset.cli import doctor
from vllm_opset.kernel import kernels_of
from vllm_opset.kernels.ascend import CANN_LIBRARIES
from vllm_opset.platform.native import evidence

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_doctor_accounts_for_every_kernel_of_every_op_for_the_device():
    finished = command("doctor", "--json")
    assert finished.code == 0, finished.output
    found = json.loads(finished.out)
    assert found["platform"] == "vllm_opset.platform.cpu.platform.OpsetCpuPlatform"
    assert found["faults"] == []
    assert found["machine"]["vllm-opset"] == PROJECT["version"]
    for op in ops.ALL:
        rows = [row for row in found["kernels"] if row["op"] == op.name]
        named = {row["kernel"] for row in rows} | {other["kernel"] for row in rows for other in row["others"]}
        assert named == set(kernels_of(op.name, device="cpu"))
        assert all(row["why"] and all(other["reason"] for other in row["others"]) for row in rows)


def test_doctor_says_why_an_override_counts_and_counts_what_it_cannot_do():
    finished = command("doctor", OPSET_KERNELS="silu_and_mul=reference,paged_attention=cpu", COLUMNS=400)
    assert finished.code == 0, finished.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in finished.out.splitlines() if "│" in line]
    ((_, why, others),) = [row for op, *row in rows if op == "silu_and_mul"]
    assert why == "asked for by OPSET_KERNELS" and "cpu: OPSET_KERNELS asks for reference" in others
    reasons = {kernel: why for op, kernel, why, _ in filter(lambda row: row[0] == "paged_attention", rows)}
    assert set(reasons) == {"cpu", "none"} and "sample problems)" in reasons["cpu"]
    assert "asks for paged_attention=cpu, which cannot do it" in reasons["none"]


@pytest.mark.parametrize(
    ("variables", "what", "cure"),
    [
        ({"OPSET_PLATFORM": "off"}, "OPSET_PLATFORM=off", "unset OPSET_PLATFORM"),
        ({"VLLM_PLUGINS": "other"}, "VLLM_PLUGINS='other' leaves it out", "add opset to it"),
        ({"VLLM_TARGET_DEVICE": "cpu"}, "VLLM_TARGET_DEVICE=cpu", "unset VLLM_TARGET_DEVICE"),
        ({"OPSET_NUM_THREADS": "0"}, "neither a number of threads nor 'auto'", "Set it to one of these, or unset it"),
        ({"OPSET_NATIVE": "sampler"}, "'sampler' is not of the form part=on", "correct that, or leave it out"),
        ({"OPSET_NATIVE": "atention=on"}, "unknown part 'atention'; did you mean 'attention'?", "correct that"),
        ({"VLLM_CPU_KVCACHE_SPACE": "-1"}, "'-1' is no number of GiB", "as in VLLM_CPU_KVCACHE_SPACE=4, or unset it"),
        ({"OPSET_KERNELS": "rms_norm=elsewhere"}, "which runs on npu, not on cpu", "name a kernel that does: cpp"),
    ],
)
def test_doctor_says_what_is_wrong_and_the_cure(command_here, variables, what, cure, monkeypatch):
    elsewhere = kernel.Kernel("rms_norm", "elsewhere", "tests", ("npu",), kernel.everything, print)
    kernels_of("rms_norm")
    monkeypatch.setitem(kernel._registry["rms_norm"], "elsewhere", elsewhere)
    monkeypatch.setattr(doctor, "_kernels", lambda *_: [])  # listing them takes seconds
    finished = command_here("doctor", **variables)
    assert finished.exit_code == 1, finished.output
    (line,) = [line for line in finished.output.splitlines() if line.startswith("NOT USED: ")]
    assert what in line
    assert cure in line.partition(". Cure: ")[2]


def test_doctor_names_the_cure_where_two_platform_plugins_meet(tmp_path):
    (tmp_path / "other_platform.py").write_text("def activate():\n    return 'other_platform.Platform'\n")
    info = tmp_path / "other_platform-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other_platform\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.platform_plugins]\nother = other_platform:activate\n")
    script = "from vllm_opset.cli import doctor; print(doctor._active_platform())"
    finished = run("python", "-c", script, PYTHONPATH=tmp_path)
    assert "vLLM finds no platform: Only one platform plugin can be activated" in finished.out, finished.output
    assert "cure='set VLLM_PLUGINS=opset, which leaves out other platform plugins: other'" in finished.out


def test_doctor_lists_kernels_in_the_order_of_the_samples():
    """The order is not that of a set, which differs from run to run."""
    rows = doctor._kernels("cpu", torch.bfloat16)
    for op in ops.ALL:
        dtype = torch.bfloat16 if torch.bfloat16 in op.dtypes else op.dtypes[0]
        problems = [op.problem_for(*args, **kwargs) for args, kwargs in (s.make() for s in op.samples("cpu", dtype))]
        names = dict.fromkeys(selection.select(op, problem).kernel.name for problem in problems)
        assert [row["kernel"] for row in rows if row["op"] == op.name] == [*names]


def test_doctor_lists_the_variants_of_a_kernel():
    rows = doctor._kernels("cpu", torch.float32)
    for row in rows:
        variants = kernels_of(row["op"])[row["kernel"]].variants
        assert row["variants"] == ([] if variants is None else list(variants.by_name))
    (attention,) = [row for row in rows if (row["op"], row["kernel"]) == ("paged_attention", "cpp")]
    assert doctor._on_one_line(attention)["kernel"] == "cpp (decode, mixed, torch)"


def test_doctor_lists_measured_kinds_in_a_terminal_of_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = {"machine": {}, "platform": None, "device": "cuda", "dtype": "bfloat16", "kernels": [], "parts": {}}
    kinds = [{**asdict(kind), "summary": kind.summary} for kind in evidence.evidence(90)]
    doctor._print({**found, "kinds": kinds}, [])
    lines = [line.rstrip() for line in capsys.readouterr().out.partition("on their own\n")[2].splitlines()]
    kind, part, *_ = lines
    assert kind == kinds[0]["kind"] and part.split() == [kinds[0]["part"], "on:", str(kinds[0]["on"])]
    assert all(len(line) <= 80 for line in lines if "cannot be had" not in line)


@pytest.mark.parametrize(
    ("files", "version"),
    [
        ({"RECORD": "brought.py,,\n"}, "3.2.0 (brought-ascend)"),
        ({}, "installed without its metadata"),
    ],
    ids=["a distribution of another name", "no distribution"],
)
def test_doctor_takes_the_version_from_the_distribution_that_brings_a_module(tmp_path, monkeypatch, files, version):
    (tmp_path / "brought.py").touch()
    info = tmp_path / "brought_ascend-3.2.0.dist-info"
    info.mkdir()
    for name, text in {"METADATA": "Metadata-Version: 2.1\nName: brought-ascend\nVersion: 3.2.0\n", **files}.items():
        (info / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor._version("brought") == version
    assert doctor._version("brought_by_nothing") == "not installed"


def test_doctor_asks_no_amd_gpu_for_cuda(monkeypatch):
    """PyTorch calls AMD's GPUs "cuda", too. vLLM's own platform serves on them."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "AMD Instinct MI300X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 4))
    monkeypatch.delenv("OPSET_PLATFORM", raising=False)
    assert not [fault for fault in doctor._faults() if "CUDA" in fault.what + fault.cure]
    assert doctor._gpu() == "AMD Instinct MI300X, compute capability 9.4, ROCm 7.0"


def test_doctor_says_why_the_platform_cannot_be_had():
    finished = command("doctor", "--json", OPSET_PLATFORM="of")
    assert finished.code == 1, finished.output
    (fault,) = json.loads(finished.out)["faults"]
    assert "OPSET_PLATFORM='of' is not a choice; known: auto, cpu, cuda, native, npu, off" in fault["what"]


@pytest.fixture
def torch_npu(tmp_path):
    """Makes a package that `import torch` loads, as it loads the real one: `torch_npu("what its import does")`."""

    def make(code: str) -> None:
        (tmp_path / "torch_npu.py").write_text(f"{code}\ndef _autoload(): ...\n")
        info = tmp_path / "torch_npu-2.13.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
        (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")

    return make


NO_CANN = "raise ImportError('libhccl.so: cannot open shared object file')"


def test_doctor_says_why_torch_cannot_be_imported_where_cann_is_absent(torch_npu, tmp_path):
    torch_npu(NO_CANN)
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in run("python", "-c", "import torch", PYTHONPATH=tmp_path).err
    finished = command("doctor", "--json", PYTHONPATH=tmp_path, ASCEND_HOME_PATH="/nowhere")
    assert finished.code == 1, finished.output
    found = json.loads(finished.out)
    (fault,) = found["faults"]
    assert "`import torch` fails in this environment" in fault["what"] and "libascendcl.so" in fault["what"]
    assert "ASCEND_HOME_PATH=/nowhere, which is no folder" in fault["what"] and "set_env.sh" in fault["what"]
    assert "export TORCH_DEVICE_BACKEND_AUTOLOAD=0" in fault["cure"]
    assert found["machine"]["torch_npu"] == "2.13.0"


def test_doctor_is_content_where_torch_does_not_load_torch_npu(torch_npu, tmp_path):
    torch_npu(NO_CANN)
    finished = command("doctor", "--json", PYTHONPATH=tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD=0)
    assert finished.code == 0, finished.output
    assert "CANN's libascendcl.so" in json.loads(finished.out)["unavailable"]["ascend"]


def test_doctor_says_that_torch_npu_cannot_be_imported(torch_npu, tmp_path):
    """Uses libraries with the names of CANN's libraries."""
    torch_npu("raise ImportError('undefined symbol: aclrtWhatever')")
    for library in CANN_LIBRARIES:
        build = run("g++", "-x", "c++", "/dev/null", "-shared", "-o", tmp_path / library)
        assert build.code == 0, build
    variables = {"PYTHONPATH": tmp_path, "LD_LIBRARY_PATH": tmp_path, "TORCH_DEVICE_BACKEND_AUTOLOAD": 0}
    finished = command("doctor", **variables)
    assert "torch_npu cannot be imported (undefined symbol: aclrtWhatever): install" in finished.output
    assert finished.code == 0, finished.output
